"""The table of a deployment: who is to blame, what is tried again, and what a verdict says."""

from __future__ import annotations

import pytest

from appliance.core import clock
from appliance.core import deployment as rules
from appliance.core.deployment import Deployment, Event, Slot, Step

pytestmark = pytest.mark.unit

NOW = 1_800_000_000.0
FIRST = Deployment(1, "scale", "2.0.0", "new", "old", started_at=NOW)


def at(step: Step, deployment: Deployment = FIRST) -> Deployment:
    """The deployment when all before `step` has passed."""
    while deployment.at is not step:
        deployment = rules.after(rules.begin(deployment, NOW), Event.PASSED, NOW)
    return deployment


def slot(digest: str, state: str, deployment: int = 1) -> Slot:
    return Slot(digest, "scale", "1.0.0", state, deployment)


@pytest.mark.parametrize(
    ("step", "condemned"),
    [
        (Step.CHECK, True),
        (Step.FETCH, False),
        (Step.VERIFY, False),
        (Step.PROVE, True),
        (Step.MEMORY, True),
        (Step.LATENCY, True),
        (Step.SHADOW, True),
        (Step.TRIAL, True),
    ],
)
def test_a_version_is_condemned_by_what_it_does_not_by_what_the_link_does(step: Step, condemned: bool) -> None:
    failed = rules.after(rules.begin(at(step), NOW), Event.FAILED, NOW, reason="too slow")
    if failed.at is Step.BACK:
        failed = rules.after(rules.begin(failed, NOW), Event.PASSED, NOW)
    assert failed.ended
    assert rules.condemned([failed], "new") == ("too slow" if condemned else "")
    assert rules.condemned([failed], "another") == ""


def test_a_newer_success_takes_the_blame_away() -> None:
    failed = rules.after(rules.begin(at(Step.PROVE), NOW), Event.FAILED, NOW, reason="wrong")
    again = at(Step.GOOD, Deployment(2, "scale", "2.0.0", "new", "old", started_at=NOW, ordered_by="me"))
    assert rules.condemned([failed, again], "new") == ""


def test_what_could_not_be_done_is_tried_again_after_waits_that_double_up_to_an_hour() -> None:
    deployment, waits = at(Step.FETCH), []
    for _ in range(20):
        deployment = rules.after(rules.begin(deployment, NOW), Event.LATER, NOW)
        waits.append(deployment.not_before - NOW)
    assert waits[:4] == [5, 10, 20, 40]
    assert waits[-1] == 3600


def test_a_daemon_that_dies_on_every_trial_serves_the_version_before_at_the_next_start() -> None:
    deployment = at(Step.TRIAL)
    for _ in range(rules.BEGINS[Step.TRIAL]):
        (deployment,) = rules.resume([rules.begin(deployment, NOW)], NOW)
    assert deployment.at is Step.BACK
    assert deployment.reason == "trial was begun 3 times and never ended well"
    served = rules.to_serve([slot("old", "good"), rules.slot_of(deployment) or slot("", "")], "scale")
    assert served
    assert served.digest == "old"


def test_a_candidate_does_not_survive_a_restart_and_is_verified_again() -> None:
    for step in (Step.PROVE, Step.MEMORY, Step.LATENCY, Step.SHADOW, Step.SWITCH):
        (again,) = rules.resume([rules.begin(at(step), NOW)], NOW)
        assert again.at is Step.VERIFY


def test_the_slot_is_bad_before_the_first_byte_and_good_only_at_the_end() -> None:
    states = {step: getattr(rules.slot_of(at(step)), "state", None) for step in rules.Step if step.value in _PATH}
    assert states == {
        Step.CHECK: None,
        Step.RESERVE: "bad",
        Step.FETCH: "bad",
        Step.VERIFY: "bad",
        Step.PROVE: "staged",
        Step.MEMORY: "staged",
        Step.LATENCY: "staged",
        Step.SHADOW: "staged",
        Step.SWITCH: "staged",
        Step.TRIAL: "trial",
        Step.GOOD: "good",
    }


_PATH = "check reserve fetch verify prove memory latency shadow switch trial good"


def test_a_start_serves_the_trial_then_the_latest_good_then_what_it_was_given() -> None:
    slots = [slot("a", "good", 1), slot("b", "good", 3), slot("c", "trial", 2), slot("d", "bad", 4)]

    def served(*revoked: str) -> str:
        found = rules.to_serve(slots, "scale", dict.fromkeys(revoked, "why"))
        return found.digest if found else "given"

    assert [served(), served("c"), served("c", "b"), served("a", "b", "c")] == ["c", "b", "a", "given"]
    assert rules.to_serve(slots, "another") is None


def test_files_stay_of_what_serves_of_what_is_under_way_and_of_one_more_to_go_back_to() -> None:
    slots = [slot("a", "good", 1), slot("b", "good", 2), slot("c", "good", 3), slot("d", "bad", 4)]
    assert rules.kept(slots, [], ["c"]) == {"b", "c"}
    under_way = Deployment(5, "scale", "2.0.0", "e", "a", started_at=NOW)
    assert rules.kept(slots, [under_way], ["c"]) == {"a", "b", "c", "e"}


def test_a_document_says_whether_the_trial_was_passed_and_every_verdict_with_its_figures() -> None:
    measured = rules.after(rules.begin(at(Step.LATENCY), NOW), Event.PASSED, NOW, figures={"g.new_p95_ms": 2.5})
    document = rules.document(measured)
    assert (document["committed"], document["digest"], document["step"]) == (False, "new", "shadow")
    assert document["verdicts"][-1]["figures"] == {"g.new_p95_ms": 2.5}
    assert rules.document(at(Step.GOOD))["committed"]


# The clock


def test_nothing_is_installed_by_a_clock_that_is_not_synchronised_or_shows_a_time_that_is_past() -> None:
    assert clock.distrust(NOW, 0.0, synced=True) == ""
    for wall, floor, synced in ((NOW, 0.0, False), (0.0, 0.0, True), (NOW, NOW + 60, True)):
        assert clock.distrust(wall, floor, synced=synced).startswith("clock_not_trusted: ")
    assert "clock.assume_synced" in clock.distrust(NOW, 0.0, synced=False)


@pytest.mark.parametrize(
    ("window", "hour", "wait_h"),
    [
        ("", 12, 0),
        ("22:00-04:30", 12, 10),
        ("22:00-04:30", 22, 0),
        ("22:00-04:30", 4, 0),
        ("22:00-04:30", 5, 17),
        ("01:00-02:00", 1.5, 0),
        ("01:00-02:00", 2, 23),
        ("03:00-03:00", 12, 0),
    ],
)
def test_a_window_that_is_closed_says_when_it_opens(window: str, hour: float, wait_h: float) -> None:
    midnight = NOW - NOW % clock.DAY_S
    assert clock.until_window(window, midnight + hour * 3600) == wait_h * 3600


def test_what_was_signed_raises_the_floor_but_never_above_the_clock() -> None:
    assert clock.raised(NOW, NOW + 50, NOW + 100) == NOW + 50
    assert clock.raised(NOW, NOW - 50, NOW + 100) == NOW
    assert clock.raised(NOW, NOW + 5000, NOW + 100) == NOW + 100


def test_a_version_that_proved_good_stays_good_while_it_is_brought_again() -> None:
    good = rules.Slot("new", "scale", "2.0.0", rules.SlotState.GOOD.value, 1)
    deployment = rules.Deployment(2, "scale", "2.0.0", "new", "old", started_at=0.0)
    while deployment.at is not Step.TRIAL:
        assert rules.slot_of(deployment, good) is None
        deployment = rules.after(rules.begin(deployment, 0.0), Event.PASSED, 0.0)
    made = rules.slot_of(deployment, good)
    assert made is not None
    assert made.state == rules.SlotState.TRIAL.value


def test_a_good_version_whose_files_are_damaged_is_good_no_more() -> None:
    good = rules.Slot("new", "scale", "2.0.0", rules.SlotState.GOOD.value, 1)
    deployment = rules.Deployment(2, "scale", "2.0.0", "new", "old", started_at=0.0)
    while deployment.at is not Step.VERIFY:
        deployment = rules.after(rules.begin(deployment, 0.0), Event.PASSED, 0.0)
    made = rules.slot_of(rules.after(deployment, Event.FAILED, 0.0), good)
    assert made is not None
    assert made.state == rules.SlotState.BAD.value
