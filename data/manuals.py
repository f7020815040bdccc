"""Copies illustrated manuals of Debian packages to a folder: python data/manuals.py OUT.

`make manuals` installs them: pages and pictures of GIMP's manual, the Debian Handbook, the Debian
policy and the file system standard as PDF. Nobody here wrote them.
"""

from __future__ import annotations

import argparse
import gzip
import re
import shutil
from pathlib import Path

GIMP = Path("/usr/share/gimp/2.0/help/en")
DOCS = Path("/usr/share/doc")
HANDBOOK = DOCS / "debian-handbook/html/en-US"
PDFS = ("debian-policy/policy.pdf.gz", "debian-policy/fhs/fhs-3.0.pdf.gz")
PAGES = 200
_SHOWN = re.compile(r'src="(images/[^"]+)"')


def copy(out: Path, pages: int = PAGES) -> None:
    """Copy what is installed; raises `FileNotFoundError` where GIMP's manual is not."""
    found = sorted(GIMP.glob("*.html"))
    if not found:
        raise FileNotFoundError(f"{GIMP} is not there: `make manuals` installs it")
    for page in found[:: max(1, len(found) // pages)]:
        shown = _SHOWN.findall(page.read_text())
        for name in [page.name, *(picture for picture in shown if (GIMP / picture).is_file())]:
            (out / "gimp" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(GIMP / name, out / "gimp" / name)
    if HANDBOOK.is_dir():
        shutil.copytree(HANDBOOK, out / "handbook", ignore_dangling_symlinks=True)
    for packed in PDFS:
        if (DOCS / packed).is_file():
            (out / Path(packed).stem).write_bytes(gzip.decompress((DOCS / packed).read_bytes()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    copy(parser.parse_args().out)


if __name__ == "__main__":
    main()
