"""What the engine must compute, spelled out on transformers' own models.

Nothing here uses the linker, the cache, the compiler or the project's position rules: sequences
are laid out by hand, positions come from the model's own `get_rope_index`, image features from
its own `get_image_features`, and attention is eager with a mask written out cell by cell.
"""

from dataclasses import dataclass

import torch

from mpic_rag.documents import Picture


def encode(model, parts, end=""):
    """Tokens and pictures of some parts: [(id, picture or None, row of its features)]."""
    rows = []
    for part in parts:
        if isinstance(part, Picture):
            before, after = map(model.codec.control, model.family.markers)
            features, grid = picture_features(model, part)
            image_id = model.network.config.image_token_id
            rows += [(i, None, None, None) for i in before]
            rows += [(image_id, row, grid, n) for n, row in enumerate(features)]
            rows += [(i, None, None, None) for i in after]
        else:
            rows += [(i, None, None, None) for i in model.codec.encode(part)]
    return rows + [(i, None, None, None) for i in model.codec.encode(end)] if end else rows


def plain(ids):
    """Rows of tokens that hold no picture."""
    return [(i, None, None, None) for i in ids]


def picture_features(model, picture):
    pixels = model.image_processor(images=[picture.decode()], return_tensors="pt")
    with torch.no_grad():
        out = model.network.get_image_features(**pixels, return_dict=True).pooler_output[0]
    return out, pixels["image_grid_thw"][0] if "image_grid_thw" in pixels else None


def embeddings(model, rows):
    embed = model.network.get_input_embeddings()
    return torch.stack([embed(torch.tensor(i)) if row is None else row for i, row, _, _ in rows])


def positions(model, rows):
    """[axes, tokens] by the model's own rule."""
    if model.network.config.model_type != "qwen2_5_vl":
        return torch.arange(len(rows))[None]
    ids = torch.tensor([[i for i, *_ in rows]])
    kinds = torch.tensor([[int(row is not None) for _, row, *_ in rows]])
    grids = [grid for _, _, grid, n in rows if n == 0]
    found, _ = model.network.model.get_rope_index(
        ids, kinds, image_grid_thw=torch.stack(grids) if grids else None
    )
    return found[:, 0]


def forward(model, embeds, position, mask):
    """Logits [tokens, vocabulary] of one eager pass without a cache."""
    axes = position.shape[0]
    before = model.network.config._attn_implementation
    model.network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            hidden = model.decoder(
                inputs_embeds=embeds[None],
                position_ids=position[:, None] if axes > 1 else position,
                attention_mask=torch.where(mask, 0.0, -torch.inf)[None, None].to(embeds),
                use_cache=False,
            ).last_hidden_state[0]
            return model.network.lm_head(hidden)
    finally:
        model.network.set_attn_implementation(before)


def full_prefill(model, rows):
    """Logits of the stock forward, from ids and pixels, positions and masks its own business."""
    ids = torch.tensor([[i for i, *_ in rows]])
    with torch.no_grad():
        if not any(row is not None for _, row, *_ in rows):
            return model.network(input_ids=ids, use_cache=False).logits[0]
        embeds = embeddings(model, rows)[None]
        extra = {}
        if model.network.config.model_type == "qwen2_5_vl":
            extra["position_ids"] = positions(model, rows)[:, None]
        return model.network(inputs_embeds=embeds, use_cache=False, **extra).logits[0]


@dataclass
class Reused:
    """A chunk: what it was compiled behind, its own tokens, and which of them are recomputed."""

    context: list
    own: list
    chosen: list


def two_copies(model, prompt):
    """Logits at the fresh tokens of a prompt whose chunks are reused, in one plain pass.

    `prompt` lists plain rows (computed afresh) and `Reused` chunks. The sequence holds, for each
    chunk, a copy of what it was compiled behind and the chunk's original tokens, which see only
    each other; then a second copy of each chosen token. Fresh tokens and second copies see fresh
    tokens, second copies, and originals of tokens that were not chosen, at or before their slot.
    """
    rows, place, mask, tags = lay_out(model, prompt)
    logits = forward(model, embeddings(model, rows), place, mask)
    fresh = [q for q, (group, *_) in enumerate(tags) if group is None]
    return logits[sorted(fresh, key=lambda q: tags[q][3])]


def lay_out(model, prompt):
    """The sequence of `two_copies`: its rows, their positions, the mask, and a tag for each."""
    whole = [r for item in prompt for r in (item.own if isinstance(item, Reused) else item)]
    where = positions(model, whole)
    rows, place, tags = [], [], []  # a tag: (group or None for fresh, order or slot, visible)
    slot = 0
    for group, item in enumerate(prompt):
        if not isinstance(item, Reused):
            for row in item:
                rows.append(row)
                place.append(where[:, slot])
                tags.append((None, slot, True, slot))
                slot += 1
            continue
        alone = item.context + item.own
        local = positions(model, alone)
        shift = where[0, slot] - local[0, len(item.context)]
        for n, row in enumerate(alone):
            m = n - len(item.context)
            rows.append(row)
            place.append(local[:, n] + shift)
            tags.append((group, n, m >= 0 and not item.chosen[m], slot + m))
        for m, row in enumerate(item.own):
            if item.chosen[m]:
                rows.append(row)
                place.append(where[:, slot + m])
                tags.append((None, slot + m, True, slot + m))
        slot += len(item.own)
    mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for q, (group, order, _, at) in enumerate(tags):
        for k, (other, its_order, visible, its_slot) in enumerate(tags):
            if group is not None:
                mask[q, k] = other == group and its_order <= order
            else:
                mask[q, k] = visible and its_slot <= at
    return rows, torch.stack(place, 1), mask, tags


def observed(model, rows, place, mask):
    """Attention [layers, heads, rows, rows], keys after RoPE and values [layers, rows, width]."""
    axes = place.shape[0]
    before = model.network.config._attn_implementation
    model.network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model.decoder(
                inputs_embeds=embeddings(model, rows)[None],
                position_ids=place[:, None] if axes > 1 else place,
                attention_mask=torch.where(mask, 0.0, -torch.inf)[None, None],
                use_cache=True,
                output_attentions=True,
            )
    finally:
        model.network.set_attn_implementation(before)
    cached = out[1].layers
    flat = [[states[0].transpose(0, 1).flatten(1) for states in (c.keys, c.values)] for c in cached]
    keys, values = (torch.stack(side) for side in zip(*flat, strict=True))
    return torch.stack([a[0] for a in out.attentions]), keys, values


def originals(prompt, tags):
    """For each reused chunk the rows of its own tokens in the sequence that `lay_out` makes."""
    groups = [n for n, item in enumerate(prompt) if isinstance(item, Reused)]
    ends = {n: [q for q, (group, *_) in enumerate(tags) if group == n] for n in groups}
    return [ends[n][len(prompt[n].context) :] for n in groups]


def question_scores(model, prompt):
    """Per reused chunk its tokens' attention from the last item, times value norm, balanced."""
    rows, place, mask, tags = lay_out(model, prompt)
    attention, _, values = observed(model, rows, place, mask)
    asked = len(prompt[-1])
    mass = attention[:, :, -asked:].mean((1, 2))  # [layers, rows]
    worth = (mass * values.norm(dim=-1)).mean(0)
    parts = [worth[own] for own in originals(prompt, tags)]
    mean = sum(part.mean() for part in parts) / len(parts)
    return [part * (part.mean() / mean) for part in parts]


def key_deviations(model, prompt):
    """Per reused chunk how far its tokens' keys of the second layer are from full prefill's."""
    rows, place, mask, tags = lay_out(model, prompt)
    _, linked, _ = observed(model, rows, place, mask)
    whole = [r for item in prompt for r in (item.own if isinstance(item, Reused) else item)]
    causal = torch.ones(len(whole), len(whole), dtype=torch.bool).tril()
    _, full, _ = observed(model, whole, positions(model, whole), causal)
    parts, slot = [], 0
    found = iter(originals(prompt, tags))
    for item in prompt:
        if isinstance(item, Reused):
            own = next(found)
            new = full[1, slot : slot + len(own)]
            parts.append((new - linked[1, own]).square().sum(-1))
        slot += len(item.own) if isinstance(item, Reused) else len(item)
    return parts
