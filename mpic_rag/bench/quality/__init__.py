"""How well linked caches answer, beside full prefill."""
