"""A machine that says of itself that it is a server with a cut card: what its daemon makes of that."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import smi, tiny
from support.daemon import Daemon, appliance

pytestmark = pytest.mark.journey


@pytest.mark.long
def test_on_a_cut_card_each_worker_has_an_instance_and_status_and_doctor_tell_of_it(tmp_path: Path) -> None:
    env = {
        "PATH": f"{smi.install(tmp_path / 'bin', 'cut')}:{os.environ['PATH']}",
        "APPLIANCE_MEMORY__RESERVE_BYTES": "0",  # a server's would leave nothing of a small machine
    }
    model = tiny.linear_model(tmp_path / "linear.onnx")
    with Daemon(tmp_path / "daemon", "--onnx", f"one={model}", "--onnx", f"two={model}", env=env) as daemon:
        status = daemon.status()
        because = "this machine is NVIDIA A100-SXM4-40GB"
        assert status["profile"] == {"name": "a100", "suits": "a100", "because": because}
        devices = {worker["device"] for worker in status["workers"]}
        assert len(devices) == 2
        for worker in status["workers"]:
            environment = Path(f"/proc/{worker['pid']}/environ").read_text().split("\0")
            assert worker["device"].startswith("MIG-")
            assert f"CUDA_VISIBLE_DEVICES={worker['device']}" in environment
        asked = {**env, "APPLIANCE_URL": daemon.url}
        assert f"profile a100: {because}\n" in appliance("status", env=asked).stdout
        checks = json.loads(appliance("doctor", "--json", env=asked).stdout)["checks"]
        found = {check["name"]: (check["verdict"], check["reason"]) for check in checks}
        assert found["profile"] == ("ok", f"a100: {because}")
        assert found["card"] == ("ok", "NVIDIA A100-SXM4-40GB: cut into 4")
