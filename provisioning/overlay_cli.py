"""`provision image`: one archive that turns a root file system of JetPack into an appliance."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def image(
    settings: Annotated[Path, typer.Argument(help="Settings of the image (TOML); see docs/image.md.")],
    out: Annotated[Path, typer.Option("--out", help="Archive to write (.tar), for `tar -x` at the root of an image.")],
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="The appliance's own wheel; default: built from this checkout.")
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option("--wheels", help="Folder of downloaded wheels; default: the user's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make the overlay that turns a root file system of JetPack into an appliance."""
    from models.folder import write_file  # noqa: PLC0415 - `provision --help` must not wait for numpy
    from provisioning import overlay, overlay_build  # noqa: PLC0415

    wanted = overlay_build.read(settings)
    with tempfile.TemporaryDirectory() as scratch:
        parts = overlay_build.gather(wanted, settings.parent, wheel, wheels, Path(scratch))
    tree = overlay.overlay(wanted, parts)
    content = overlay.tar(tree)
    write_file(out, content)
    digest = hashlib.sha256(content).hexdigest()
    if as_json:
        found = {"out": str(out), "sha256": digest, "files": len(tree), "bytes": len(content), "python": wanted.python}
        print(json.dumps(found))
        return
    print(f"{out}: {len(tree)} files, {len(content) / 1e6:.1f} MB for Python {wanted.python}, sha256 {digest}")
    print(f"lay it over a root file system: tar -xpf {out} -C Linux_for_Tegra/rootfs")
