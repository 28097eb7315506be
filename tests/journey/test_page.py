"""The status page in a real browser: what it shows, how it follows the daemon, and what it does with a picture."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import tiny
from support.browser import PHONE, browser, drop, needs_chromium, opened, until
from support.daemon import Daemon, StartDaemon
from support.mirror import Mirror
from support.processes import eventually, free_port, new_mark

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.journey, needs_chromium]

PAGES = Path(__file__).parent.parent / "data/ocr/pages"
NARROW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for this file."""
    with browser() as started:
        yield started


def text(page: Page, selector: str) -> str:
    return page.inner_text(selector)


def test_the_page_shows_models_memory_the_hour_and_the_device(chromium: Browser, tiny_daemon: Daemon) -> None:
    with opened(chromium, tiny_daemon.url) as page:
        until(page, "document.querySelectorAll('#models > li').length === 5")
        assert text(page, "#summary") == "Ready"
        cards = text(page, "#models")
        for model in tiny_daemon.status()["models"]:
            assert f"{model['name']} {model['version']} ● ready" in cards
        assert "onnxruntime-cpu" in cards
        assert re.search(r"as given, [0-9a-f]{12}", cards)
        bar = page.get_by_role("img", name=re.compile(r"^blank \d+ MiB, .*free for models"))
        assert bar.is_visible()
        assert "leased" in text(page, "#memory")
        for title in ("Requests a second", "Time to an answer", "Queue", "Not answered"):
            assert page.get_by_role("img", name=f"{title}, last hour").is_visible()
        assert "no broker is configured" in text(page, "#machine")
        assert "None since the start" in text(page, "#faults")
        assert not page.is_visible("#update")
        assert "temperature" not in text(page, "#machine") or "°C" in text(page, "#machine")


@pytest.mark.long
def test_a_fault_and_its_recovery_and_the_load_show_without_a_reload_and_the_hour_survives_one(
    chromium: Browser, start_null: StartDaemon
) -> None:
    daemon = start_null()
    with opened(chromium, daemon.url) as page:
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        until(page, "/null: crash/.test(faults.innerText)")
        until(page, "/recovered in/.test(faults.innerText)")
        until(page, "/1 restarts/.test(models.innerText)")
        seen = "/answered (?!0\\b(?![.]))[0-9]/.test(plots.innerText)"

        def loaded() -> bool:
            daemon.infer("null", np.ones((1, 2), np.float32))
            return bool(page.evaluate(seen))

        eventually(loaded, "the plot shows answers", 30)
        page.reload()
        until(page, "/highest [0-9.]+ ms/.test(plots.innerText)")
        assert "null: crash" in text(page, "#faults")
    daemon.stop()


def test_a_dropped_picture_is_read_and_drawn_and_what_is_no_picture_is_refused_in_words(
    chromium: Browser, tiny_daemon: Daemon
) -> None:
    with opened(chromium, tiny_daemon.url) as page:
        assert page.input_value("#model") == "blank"
        drop(page, "noise.png", "image/png", tiny.picture(64, 48))
        until(page, "/No lines of text in noise.png; blank 1.0.0/.test(outcome.innerText)")
        page.wait_for_selector("#canvas:not([hidden])")
        assert page.evaluate("[canvas.width, canvas.height]") == [64, 48]
        page.set_input_files("#picture", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": b"no picture"})
        until(page, "/a.jpg: .*neither a JPEG nor a PNG/.test(outcome.innerText)")
        assert not page.is_visible("#canvas")


@pytest.mark.long
def test_a_daemon_that_is_gone_is_told_and_followed_again_when_it_is_back(
    chromium: Browser, start_daemon: StartDaemon
) -> None:
    address = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", address).wait_serving()
    with opened(chromium, daemon.url) as page:
        assert "No models" in text(page, "#models")
        assert not page.is_visible("#try")
        daemon.stop()
        until(page, "/The daemon does not answer/.test(summary.innerText)")
        again = start_daemon("--http", address, folder="again").wait_serving()
        until(page, "summary.innerText === 'Ready'")
        assert text(page, "#device") == again.status()["device_id"]
    again.stop()


def test_a_model_that_cannot_be_loaded_is_shown_with_its_reason(
    chromium: Browser, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no model")
    daemon = start_daemon("--onnx", f"broken={broken}", APPLIANCE_RUNTIME="null").wait_serving()
    with opened(chromium, daemon.url) as page:
        until(page, "/not a null graph/.test(models.innerText)")
        assert text(page, "#summary") == "Not ready: broken"
        assert "plan-refused" in text(page, "#faults")


def test_on_a_phone_in_the_dark_nothing_is_wider_than_the_screen_and_all_is_reached_by_keyboard(
    chromium: Browser, tiny_daemon: Daemon
) -> None:
    with opened(chromium, tiny_daemon.url, viewport=PHONE, color_scheme="dark") as page:
        page.wait_for_selector("#models > li")
        assert page.evaluate(NARROW) == 0
        lightness = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
        )
        assert max(lightness) < 60
        reached = []
        for _ in range(6):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
        assert reached == ["model", "picture", "overlay", "status as JSON", "metrics", "OpenAPI"]
        assert page.get_by_role("combobox", name="Model").count() == 1
        assert page.get_by_role("checkbox", name="Text over the picture").count() == 1
        assert page.get_by_label("Drop a picture here, or choose one").count() == 1
        assert page.get_by_role("region").count() >= 6


@pytest.mark.long
def test_text_of_a_real_picture_is_listed_and_drawn_where_it_stands(
    chromium: Browser, start_daemon: StartDaemon, reading_bundle: Path
) -> None:
    daemon = start_daemon("--bundle", str(reading_bundle)).wait_serving().wait_ready()
    receipt = PAGES / "sroie_019.jpg"
    with opened(chromium, daemon.url) as page:
        shown = "canvas.toDataURL()"
        drop(page, receipt.name, "image/jpeg", receipt.read_bytes())
        page.wait_for_selector("#canvas:not([hidden])", timeout=60_000)
        lines = page.eval_on_selector_all("#lines > li", "items => items.map((item) => item.innerText)")
        assert len(lines) > 5
        assert any("TOTAL" in line.upper() for line in lines)
        covered = page.evaluate(shown)
        page.uncheck("#overlay")
        eventually(lambda: page.evaluate(shown) != covered, "the picture itself shows again", 20)
        assert page.evaluate(NARROW) == 0
    daemon.stop()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_update_is_shown_while_it_is_under_way_with_the_gates_that_it_has_passed(
    chromium: Browser, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    one, two = (tiny.scale_bundle(tmp_path / f"v{n}", n, null=True) for n in (1, 2))
    with Mirror(tmp_path / "published") as mirror:
        daemon = start_daemon(
            "--bundle",
            str(one),
            APPLIANCE_RUNTIME="null",
            APPLIANCE_CLOCK__ASSUME_SYNCED="true",
            APPLIANCE_UPDATE__URL=mirror.url,
            APPLIANCE_UPDATE__ROOT=str(mirror.root),
            APPLIANCE_UPDATE__RESERVE_BYTES="0",
            APPLIANCE_UPDATE__SHADOW_REQUESTS="0",
            APPLIANCE_UPDATE__TRIAL_S="30",
        )
        daemon.wait_serving().wait_ready()
        with opened(chromium, daemon.url, viewport=PHONE) as page:
            page.wait_for_selector("#update:not([hidden])")
            mirror.add(two)
            document = {"id": new_mark(), "command": "update", "args": {}}
            daemon.http.post("/v1/commands", json=document, headers=daemon.authorized("admin")).raise_for_status()
            until(page, "/scale 2.0.0 is at step trial/.test(window['update-state'].innerText)")
            until(page, "/memory passed[^]*latency passed/.test(gates.innerText)")
            until(page, "/scale 2.0.0[^]*trial, /.test(models.innerText)")
            assert page.evaluate(NARROW) == 0
            until(page, "/scale 2.0.0: good/.test(gates.innerText)", 90)
            until(page, "/good, [0-9a-f]{12}/.test(models.innerText)")
        daemon.stop()
