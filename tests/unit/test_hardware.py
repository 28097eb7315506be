"""Which profile a machine gets, how a card is cut, and where workers sit. What nvidia-smi says is from documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.boards import plant
from support.smi import said

from appliance import doctor, hardware
from appliance.doctor import Here
from appliance.hardware import Card, Instance, Offer
from appliance.settings import Gpu

pytestmark = pytest.mark.unit

MIG = Gpu(share="mig", parts=4)
CUT = "sudo nvidia-smi mig -i 0 -cgi 15,15,15,15 -C && nvidia-smi -L"


def nothing(_command: object) -> str:
    """A machine without nvidia-smi."""
    return ""


@pytest.mark.parametrize("board", ["orin-nano", "orin-nx", "agx-orin"])
def test_a_jetson_gets_the_profile_of_its_module(board: str, tmp_path: Path) -> None:
    name, because = hardware.suited(plant(tmp_path, board, "36.4.3"), nothing)
    assert name == board
    assert because.startswith("this machine is NVIDIA Jetson ")


@pytest.mark.parametrize(
    ("number", "profile"), [("p3767-0000", "orin-nx"), ("p3767-0005-super", "orin-nano"), ("p3701-0005", "agx-orin")]
)
def test_a_board_that_calls_itself_otherwise_gets_the_profile_of_its_module(
    number: str, profile: str, tmp_path: Path
) -> None:
    tree = tmp_path / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "model").write_text("Smart Camera 5\0")
    (tree / "compatible").write_text(f"acme,camera+{number}\0nvidia,tegra234\0")
    assert hardware.suited(tmp_path, nothing) == (profile, "this machine is Smart Camera 5")


def test_a_server_gets_the_profile_of_its_card_and_a_stranger_that_of_any_machine(tmp_path: Path) -> None:
    assert hardware.suited(tmp_path, said("whole")) == ("a100", "this machine is NVIDIA A100-SXM4-40GB")
    assert hardware.suited(tmp_path, nothing) == ("cpu", "no profile is made for this machine in particular")
    assert hardware.suited(tmp_path, lambda _: "GPU 0: NVIDIA H200 (UUID: GPU-1)\n") == (
        "cpu",
        "no profile is made for NVIDIA H200",
    )


def test_cards_are_listed_with_their_instances() -> None:
    (card,) = hardware.cards(said("cut"))
    assert (card.index, card.name, card.mig) == (0, "NVIDIA A100-SXM4-40GB", "Enabled")
    assert [one.size for one in card.instances] == ["1g.10gb"] * 4
    assert len({one.uuid for one in card.instances}) == 4
    two = hardware.listed("GPU 0: A (UUID: GPU-a)\n  MIG 1g.5gb     Device  0: (UUID: MIG-b)\nGPU 1: C (UUID: GPU-c)\n")
    assert [(one.name, len(one.instances), one.mig) for one in two] == [("A", 1, ""), ("C", 0, "")]
    assert hardware.listed("No devices found.\n") == hardware.cards(nothing) == []


def test_sizes_are_read_from_the_table_without_those_that_a_card_has_once() -> None:
    offered = hardware.offers(said("on")(["nvidia-smi", "mig", "-lgip"]), 0)
    assert offered[:2] == [Offer(7, "19", 14), Offer(4, "15", 14)]
    assert [one.number for one in offered] == ["19", "15", "14", "9", "5", "0"]
    assert hardware.offers("No MIG-supported devices found.\n", 0) == hardware.offers("", 0) == []


@pytest.mark.parametrize(("parts", "number"), [(1, "0"), (2, "9"), (3, "14"), (4, "15"), (5, "19"), (7, "19")])
def test_a_card_is_cut_into_the_largest_equal_instances_listed_or_documented(parts: int, number: str) -> None:
    offered = hardware.offers(said("on")(["nvidia-smi", "mig", "-lgip"]), 0)
    make = [f"sudo nvidia-smi mig -i 0 -cgi {','.join([number] * parts)} -C", "nvidia-smi -L"]
    (whole,), (on,) = hardware.cards(said("whole")), hardware.cards(said("on"))
    assert hardware.cut(on, parts, offered) == hardware.cut(on, parts, []) == make
    assert hardware.cut(whole, parts, []) == ["sudo nvidia-smi -i 0 -mig 1", *make]


def test_what_cannot_be_cut_gets_no_command_and_what_is_not_known_is_looked_at_again() -> None:
    (on,) = hardware.cards(said("on"))
    assert hardware.cut(on, 8, []) == []
    assert hardware.cut(Card(1, "NVIDIA T4", "GPU-t", mig="[N/A]"), 2, []) == []
    other = Card(1, "NVIDIA H200", "GPU-h", mig="Disabled")
    assert hardware.cut(other, 2, []) == ["sudo nvidia-smi -i 1 -mig 1", "appliance doctor"]


def test_the_doctor_says_how_to_cut_a_card_and_sees_when_that_was_done(tmp_path: Path) -> None:
    def check(card: str, gpu: Gpu) -> doctor.Check:
        here = Here(tmp_path, said(card))
        return doctor.card(here, gpu, hardware.cards(here.run))

    whole, on, cut = (check(card, MIG) for card in ("whole", "on", "cut"))
    assert [one.verdict for one in (whole, on, cut)] == ["warn", "warn", "ok"]
    assert whole.reason.endswith("is not cut into 4 equal instances: MIG is off")
    assert f"sudo nvidia-smi -i 0 -mig 1 && {CUT}" in whole.remedy
    assert on.reason.endswith("it has none")
    assert f"then: {CUT}" in on.remedy
    other = check("cut", Gpu(share="mig", parts=3))
    assert other.reason.endswith("it has 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb")
    assert "-dci && sudo nvidia-smi mig -i 0 -dgi && sudo nvidia-smi mig -i 0 -cgi 14,14,14 -C" in other.remedy
    assert "set gpu.parts to fewer" in check("cut", Gpu(share="mig", parts=9)).remedy
    assert check("whole", Gpu()).reason == "NVIDIA A100-SXM4-40GB: not divided"


def test_the_doctor_says_how_to_start_mps_and_sees_when_it_runs(tmp_path: Path) -> None:
    here, gpu = Here(tmp_path, said("whole")), Gpu(share="mps", parts=4)
    found = hardware.cards(here.run)
    check = doctor.card(here, gpu, found)
    assert check.verdict == "warn"
    assert "sudo nvidia-smi -i 0 -c EXCLUSIVE_PROCESS && sudo nvidia-cuda-mps-control -d" in check.remedy
    (tmp_path / "tmp/nvidia-mps").mkdir(parents=True)
    (tmp_path / "tmp/nvidia-mps/control").touch()
    assert doctor.card(here, gpu, found).reason == "NVIDIA A100-SXM4-40GB: shares of 25 %"


def test_the_doctor_names_a_profile_that_does_not_suit_the_machine() -> None:
    assert doctor.profile("", "a100", "this machine is an A100", None).verdict == "ok"
    check = doctor.profile("a100", "a100", "this machine is an A100", {"profile": {"name": "cpu"}})
    assert (check.verdict, check.reason) == ("warn", "cpu was chosen by hand: this machine is an A100")


def test_workers_are_spread_over_instances_and_a_place_that_was_left_is_taken_first() -> None:
    card = Card(0, "A100", "GPU-a", tuple(Instance("1g.10gb", f"MIG-{i}") for i in range(4)), "Enabled")
    seats = hardware.seats("mig", 4, (), 0, lambda: [card])
    taken = [seats.take()[0] for _ in range(8)]
    assert Counter(taken) == dict.fromkeys(("MIG-0", "MIG-1", "MIG-2", "MIG-3"), 2)
    seats.leave("MIG-2")
    assert seats.take() == ("MIG-2", {"CUDA_VISIBLE_DEVICES": "MIG-2"})


def test_shares_of_mps_are_equal_and_bounded_in_memory_and_named_devices_go_before_those_found() -> None:
    shares = hardware.seats("mps", 4, (), 2**33, list)
    assert shares.take() == (
        "",
        {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M"},
    )
    assert hardware.seats("mig", 4, ("GPU-x",), 2**33, list).take() == ("GPU-x", {"CUDA_VISIBLE_DEVICES": "GPU-x"})
    assert hardware.seats("", 1, (), 2**33, list).take() == ("", {})
