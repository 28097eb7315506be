"""The shape of the code itself: who may import whom, what a start loads, how long a file may be."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("models", "kernels", "provisioning", "appliance", "tests")
LONGEST_FILE_LINES = 400


def loaded_after(program: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after `program`; those that were blocked do not count."""
    report = "import json, sys; print(json.dumps([name for name, module in sys.modules.items() if module]))"
    run = subprocess.run([sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def unargued(files: Iterable[Path]) -> list[str]:
    """Files past 400 lines whose docstring does not say why they are."""
    return [
        f"{path.name} has {text.count(chr(10))} lines: split it, or argue for its more than 400 lines in its docstring"
        for path in files
        if (text := path.read_text(encoding="utf-8")).count("\n") > LONGEST_FILE_LINES
        and str(LONGEST_FILE_LINES) not in (ast.get_docstring(ast.parse(text)) or "")
    ]


def test_every_import_keeps_the_layers() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([str(lint), "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " 0 broken" in run.stdout


def test_the_daemon_starts_without_the_libraries_of_the_clients() -> None:
    loaded = loaded_after(
        "import sys, contextlib\n"
        "sys.argv = ['appliance', 'run', '--help']\n"
        "from appliance.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "import appliance.daemon"
    )
    assert "appliance.start" in loaded
    assert not loaded & {"typer", "rich", "httpx", "click.testing", "appliance.client_cli"}


def test_the_daemon_itself_never_loads_a_runtime_because_only_workers_may_touch_one() -> None:
    loaded = loaded_after("import appliance.daemon")
    assert not loaded & {"onnxruntime", "tensorrt", "onnx", "torch", "cv2"}


def test_the_daemon_starts_without_what_only_updates_need() -> None:
    loaded = loaded_after("import appliance.daemon")
    assert not loaded & {"tuf", "cryptography", "zstandard", "urllib3", "sqlite3", "appliance.updater"}


def test_the_sync_with_upstream_needs_no_library_of_the_clients_or_of_the_server() -> None:
    loaded = loaded_after("import appliance.cloudsync, appliance.adapters.exchange, appliance.second_opinion")
    assert "urllib3" in loaded
    assert not loaded & {"httpx", "typer", "tuf", "cv2", "sqlalchemy", "alembic", "appliance.upstream"}


def test_a_device_starts_without_the_libraries_of_the_upstream_and_whoever_asks_for_that_role_is_told() -> None:
    loaded = loaded_after("import appliance.daemon")
    assert not loaded & {"sqlalchemy", "alembic", "psycopg", "appliance.upstream"}
    program = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from appliance.daemon import _home\n"
        "from models.errors import ConfigError\n"
        "try: _home(*[None] * 4, now=None, ended=None)\n"
        "except ConfigError as error: assert 'install edge-appliance[upstream]' in str(error), error\n"
        "else: raise SystemExit(1)"
    )
    loaded_after(program)


def test_the_clients_start_without_the_daemon() -> None:
    loaded = loaded_after("import appliance.client_cli")
    assert not loaded & {"fastapi", "uvicorn", "pydantic_settings", "onnxruntime", "paho", "appliance.daemon"}


def test_engines_are_compiled_on_devices_that_lack_the_libraries_of_the_workshop() -> None:
    loaded = loaded_after("import provisioning.engines.builder")
    assert "provisioning.engines.child" in loaded
    assert not loaded & {"onnx", "onnx_ir", "onnxscript", "onnxruntime", "tensorrt", "tensorrt_rtx_bindings", "triton"}


def test_models_know_no_runtime_no_server_and_no_checker() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "models").rglob("*.py")
    ]
    assert "models.spec" in modules
    loaded = loaded_after("\n".join(f"import {module}" for module in modules))
    assert not loaded & {"pydantic", "onnxruntime", "onnx", "fastapi", "appliance", "provisioning", "kernels"}


def test_a_worker_starts_without_the_server_around_it() -> None:
    loaded = loaded_after("import appliance.worker")
    assert not loaded & {"fastapi", "uvicorn", "pydantic", "structlog", "paho", "asyncio", "appliance.service"}


def test_a_long_file_argues_for_itself() -> None:
    assert unargued(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))) == []


def test_a_long_file_without_an_argument_would_be_found(tmp_path: Path) -> None:
    contents = {
        "short.py": "pass\n",
        "just.py": "pass\n" * 400,
        "argued.py": '"""More than 400 lines, because they are one table."""\n' + "pass\n" * 400,
        "long.py": '"""One table."""\n' + "pass\n" * 400,
        "bare.py": "pass\n" * 401,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    found = unargued(tmp_path / name for name in contents)
    assert [sentence.split()[0] for sentence in found] == ["long.py", "bare.py"]
