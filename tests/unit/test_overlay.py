"""The image overlay: the same settings give the same bytes, and what a device finds is what was asked for."""

from __future__ import annotations

import configparser
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette

from appliance import settings
from appliance.adapters.access import gate_before
from appliance.adapters.tokens import TokenFile
from models.errors import ConfigError, WorkshopError
from provisioning import overlay, overlay_build, overlay_wheels
from provisioning.overlay import File, FirstBoot, Image, Link, Network, Parts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.unit

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"


def wheel(name: str, version: str, files: dict[str, str], *needs: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = f"{name}-{version}.dist-info"
        metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
        for path, text in (files | {f"{info}/METADATA": "\n".join(metadata) + "\n"}).items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return buffer.getvalue()


COMMANDS = "[console_scripts]\nappliance = appliance.cli:main\nprovision = provisioning.cli:main\n"
ENTRY_POINTS = "edge_appliance-1.0.0.dist-info/entry_points.txt"
OURS = wheel("edge_appliance", "1.0.0", {"appliance/cli.py": "", ENTRY_POINTS: COMMANDS})
OTHER = wheel("speedups", "2.1", {"speedups/fast.so": "ELF", "speedups-2.1.data/data/share/notes.txt": "notes"})
ASTRAY = wheel("x", "1", {"../../../etc/passwd": "root::0:0"})
PARTS = Parts(
    wheels={
        "edge_appliance-1.0.0-py3-none-any.whl": OURS,
        "speedups-2.1-cp310-cp310-manylinux_2_28_aarch64.whl": OTHER,
    },
    units={path.name: path.read_bytes() for path in SYSTEMD.iterdir()},
    state={"slots/abc/manifest.json": File(b"{}", 0o600), "repository/root.json": Link("root_history/1.root.json")},
    digests=("abc",),
    root=b"{}",
    authority=b"PEM",
    ssh_keys=b"ssh-ed25519 AAAA\n",
)
KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"
MOUNT = "etc/systemd/system/var-lib-appliance.mount"
NM = "etc/NetworkManager/system-connections/appliance.nmconnection"
IMAGE = Image(
    config={"mqtt": {"host": "broker.example.com", "port": 8883}, "update": {"url": "https://updates.example.com/r"}},
    first_boot=FirstBoot(power_mode=2),
)


def text(tree: overlay.Tree, path: str) -> str:
    node = tree[path]
    assert isinstance(node, File)
    return node.content.decode()


def test_the_same_settings_give_the_same_bytes_whatever_the_order_of_the_parts() -> None:
    shuffled = replace(PARTS, wheels=dict(reversed(PARTS.wheels.items())), units=dict(reversed(PARTS.units.items())))
    assert overlay.tar(overlay.overlay(IMAGE, PARTS)) == overlay.tar(overlay.overlay(IMAGE, shuffled))


def test_the_environment_is_of_the_systems_python_and_links_only_tensorrt() -> None:
    tree = overlay.overlay(IMAGE, PARTS)
    site = "opt/appliance/lib/python3.10/site-packages"
    assert tree["opt/appliance/bin/python"] == Link("/usr/bin/python3.10")
    assert tree[f"{site}/tensorrt"] == Link("/usr/lib/python3.10/dist-packages/tensorrt")
    assert "include-system-site-packages = false" in text(tree, "opt/appliance/pyvenv.cfg")
    assert text(tree, f"{site}/speedups/fast.so") == "ELF"
    assert text(tree, "opt/appliance/share/notes.txt") == "notes"
    assert [path for path in tree if path.startswith("opt/appliance/bin/")] == [
        "opt/appliance/bin/python",
        "opt/appliance/bin/appliance",
        "opt/appliance/bin/provision",
    ]
    command = tree["opt/appliance/bin/appliance"]
    assert isinstance(command, File)
    assert command.mode == 0o755
    assert "tensorrt" not in " ".join(overlay.overlay(replace(IMAGE, tensorrt=False), PARTS))


def test_a_laid_out_environment_runs_the_commands_of_its_wheels_and_nothing_of_the_callers(tmp_path: Path) -> None:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    code = "import sys\n\ndef main():\n    print(sys.prefix, *sys.argv[1:])\n"
    own = wheel(
        "edge_appliance",
        "1.0.0",
        {
            "appliance/__init__.py": "",
            "appliance/cli.py": code,
            ENTRY_POINTS: COMMANDS,
        },
    )
    tree = overlay.overlay(
        replace(IMAGE, python=python, tensorrt=False), replace(PARTS, wheels={"edge_appliance-1.whl": own})
    )
    with tarfile.open(fileobj=io.BytesIO(overlay.tar(tree))) as archive:
        members = [one for one in archive.getmembers() if one.name.startswith("opt/")]
        archive.extractall(tmp_path, members, filter="tar")
    interpreter = tmp_path / "opt/appliance/bin/python"
    interpreter.unlink()
    real = Path(sys.executable).resolve()  # where this machine has it, in the place of where a device does
    interpreter.symlink_to(real)
    settings_of_it = tmp_path / "opt/appliance/pyvenv.cfg"
    settings_of_it.write_text(settings_of_it.read_text().replace("/usr/bin", str(real.parent)))
    (tmp_path / "appliance").mkdir()
    (tmp_path / "appliance/__init__.py").write_text("raise ImportError('the caller is not asked')")
    command = tmp_path / "opt/appliance/bin/appliance"
    done = subprocess.run(
        [interpreter, "-I", command, "status"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{tmp_path}/opt/appliance status\n", done.stderr


def test_units_are_enabled_as_they_ask_and_the_first_boot_with_them() -> None:
    tree = overlay.overlay(IMAGE, PARTS)
    system = "etc/systemd/system"
    assert tree[f"{system}/multi-user.target.wants/appliance.target"] == Link(f"/{system}/appliance.target")
    for unit in ("appliance.service", "appliance-firstboot.service", "appliance-callhome.service"):
        assert tree[f"{system}/appliance.target.wants/{unit}"] == Link(f"/{system}/{unit}")
    assert not [path for path in tree if ".wants/" in path and "rollback" in path], "only a failure starts it"
    assert "appliance" in text(tree, "usr/lib/sysusers.d/appliance.conf")
    plan = json.loads(text(tree, "etc/appliance/firstboot.json"))
    assert (plan["power_mode"], plan["grow"], plan["lock"], plan["bytecode"]) == (2, True, True, True)


def test_the_state_may_lie_on_a_partition_of_its_own_that_is_mounted_before_anything_needs_it() -> None:
    tree = overlay.overlay(replace(IMAGE, data="models-1"), PARTS)
    assert "What=/dev/disk/by-partlabel/models-1\nWhere=/var/lib/appliance\n" in text(tree, MOUNT)
    device = r"dev-disk-by\x2dpartlabel-models\x2d1.device"
    assert f"BindsTo={device}\nAfter={device}\n" in text(tree, "etc/systemd/system/appliance-data.service")
    assert not [path for path in tree if path.startswith("var/lib/appliance")], "the mount would hide it"
    assert "usr/share/appliance/state/slots/abc/manifest.json" in tree
    assert json.loads(text(tree, "etc/appliance/firstboot.json"))["fill"]
    assert MOUNT not in overlay.overlay(IMAGE, PARTS)


def test_the_devices_settings_are_those_asked_for_with_what_the_image_brought(tmp_path: Path) -> None:
    tree = overlay.overlay(IMAGE, PARTS)
    (tmp_path / "config.toml").write_text(text(tree, "etc/appliance/config.toml"))
    loaded = settings.load(profile="cpu", config=tmp_path / "config.toml", flags={})
    assert loaded.bundles == (Path("/var/lib/appliance/slots/abc"),)
    assert loaded.update.root == Path("/etc/appliance/root.json")
    assert (loaded.mqtt.host, loaded.mqtt.port) == ("broker.example.com", 8883)
    node = tree["etc/appliance/config.toml"]
    assert isinstance(node, File)
    assert node.mode == 0o640, "it may hold a password"


@pytest.mark.parametrize("said", ["\N{THERMOMETER} press \N{FACTORY}", 'a "quoted"\tname\x7f', "line\nline"])
def test_settings_of_any_characters_come_back_as_they_were(said: str) -> None:
    table = {"name": said, "part": {said: [said, 1, True]}}
    assert tomllib.loads(overlay.toml(table)) == table


def test_nobody_can_log_in_by_a_password_and_only_with_the_keys_that_were_given() -> None:
    tree = overlay.overlay(IMAGE, PARTS)
    assert "PasswordAuthentication no" in text(tree, "etc/ssh/sshd_config.d/appliance.conf")
    assert text(tree, "etc/ssh/authorized_keys.d/maintainer") == "ssh-ed25519 AAAA\n"
    without = overlay.overlay(IMAGE, replace(PARTS, ssh_keys=b""))
    assert not [path for path in without if "authorized_keys.d" in path]


def test_whoever_logs_in_may_become_root_also_with_a_key_that_came_with_the_call_home() -> None:
    for keys in (PARTS.ssh_keys, b""):
        node = overlay.overlay(IMAGE, replace(PARTS, ssh_keys=keys))["etc/sudoers.d/appliance"]
        assert node == File(b"maintainer ALL=(ALL) NOPASSWD: ALL\n", 0o440)


def test_the_daemons_user_may_start_the_device_anew_by_the_polkit_of_either_jetpack() -> None:
    tree = overlay.overlay(IMAGE, PARTS)
    old = configparser.ConfigParser()
    old.read_string(text(tree, "etc/polkit-1/localauthority/50-local.d/appliance.pkla"))
    (section,) = old.sections()
    assert old[section]["Identity"] == "unix-user:appliance"
    assert old[section]["ResultAny"] == "yes"
    assert "org.freedesktop.login1.reboot" in old[section]["Action"].split(";")
    rule = text(tree, "etc/polkit-1/rules.d/50-appliance.rules")
    assert 'subject.user == "appliance" && ["org.freedesktop.login1.reboot", ' in rule


@pytest.mark.parametrize(
    ("manager", "path", "line"),
    [
        (
            "NetworkManager",
            "etc/NetworkManager/system-connections/appliance.nmconnection",
            "address1=192.168.1.20/24,192.168.1.1",
        ),
        ("systemd-networkd", "etc/systemd/network/10-appliance.network", "Address=192.168.1.20/24"),
    ],
)
def test_a_fixed_address_is_given_in_the_words_of_who_manages_the_network(manager: str, path: str, line: str) -> None:
    network = Network("192.168.1.20/24", "192.168.1.1", ("9.9.9.9",), manager)
    assert line in text(overlay.overlay(replace(IMAGE, network=network), PARTS), path).splitlines()


@pytest.mark.parametrize(
    ("image", "parts", "error", "says"),
    [
        (replace(IMAGE, python="3.8"), PARTS, ConfigError, "python is '3.8', which no image has"),
        (
            replace(IMAGE, network=Network("10.0.0.2/24", manager="ifupdown")),
            PARTS,
            ConfigError,
            "choose NetworkManager",
        ),
        (IMAGE, replace(PARTS, wheels={}), WorkshopError, "the wheel of the appliance itself is missing"),
        (IMAGE, replace(PARTS, wheels={**PARTS.wheels, "x-1.whl": b"no zip"}), WorkshopError, "x-1.whl is no wheel"),
        (IMAGE, replace(PARTS, wheels={**PARTS.wheels, "x-1.whl": ASTRAY}), WorkshopError, "leads out of it"),
    ],
)
def test_what_fits_no_image_is_refused_in_a_sentence(
    image: Image, parts: Parts, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        overlay.overlay(image, parts)


@pytest.mark.parametrize(
    ("image", "parts", "says"),
    [
        (IMAGE, replace(PARTS, authority=KEY), "authority holds a private key"),
        (IMAGE, replace(PARTS, ssh_keys=KEY), "ssh_keys holds a private key"),
        (replace(IMAGE, first_boot=FirstBoot(enroll=("--url", "https://x", "--token", "t"))), PARTS, "has a token"),
        (replace(IMAGE, first_boot=FirstBoot(enroll=("--token=t",))), PARTS, "has a token"),
        (replace(IMAGE, ntp=("time.example.com\n[Manager]",)), PARTS, "no name or address of a server"),
        (replace(IMAGE, watchdog_s=0), PARTS, "watchdog_s is 0"),
        (replace(IMAGE, journal_mib=-1), PARTS, "journal_mib is -1"),
        (replace(IMAGE, network=Network("192.168.1.20")), PARTS, "its length too"),
        (replace(IMAGE, network=Network("192.168.1.20/24\nmethod=auto")), PARTS, "network.address is"),
        (replace(IMAGE, network=Network("192.168.1.20/24", "router")), PARTS, "network.gateway is 'router'"),
        (replace(IMAGE, network=Network("192.168.1.20/24", dns=("9.9.9",))), PARTS, "network.dns is '9.9.9'"),
    ],
)
def test_what_no_device_should_have_does_not_get_into_an_image(image: Image, parts: Parts, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        overlay.overlay(image, parts)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[config]\nmqtt.hots = 'x'\n", "mqtt.hots is no setting; did you mean mqtt.host"),
        ("pyton = '3.10'\n[config]\n", "unknown key 'pyton'; did you mean 'python'"),
        ("python =", "image.toml"),
        (
            '[config.http]\nhost = "0.0.0.0"\ntls_certificate = "/etc/appliance/tls.pem"\n',
            "others can reach, and an image holds no token",
        ),
        (
            '[config.http]\ntls_certificate = "/etc/appliance/tls.pem"\n',
            "http.tls_certificate is /etc/appliance/tls.pem, which this image does not hold",
        ),
        ('[config.mqtt]\nhost = "broker"\ntls = true\nca = "/etc/appliance/fleet-ca.pem"\n', "mqtt.ca is /etc"),
    ],
)
def test_settings_that_no_daemon_could_start_with_are_refused_on_the_pc(
    tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "image.toml").write_text(content)
    with pytest.raises(ConfigError, match=says):
        overlay_build.read(tmp_path / "image.toml")


def test_the_documented_image_starts(tmp_path: Path) -> None:
    documented = (SYSTEMD.parent / "docs/image.md").read_text().split("```toml\n")[1].split("```")[0]
    (tmp_path / "image.toml").write_text(documented)
    wanted = overlay_build.read(tmp_path / "image.toml")
    (tmp_path / "config.toml").write_text(text(overlay.overlay(wanted, PARTS), "etc/appliance/config.toml"))
    told = settings.load(profile="cpu", config=tmp_path / "config.toml", flags={"state_dir": tmp_path})
    gate_before(Starlette(), told.http, TokenFile(tmp_path))
    assert told.http.on_loopback
    assert (told.http.tls_certificate, told.mqtt.tls) == (None, True)


def store(folder: Path, *wheels: tuple[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in wheels:
        (folder / name).write_bytes(content)
    return folder


def test_wheels_are_chosen_by_the_devices_python_and_processor_not_by_this_ones(tmp_path: Path) -> None:
    ours = tmp_path / "edge_appliance-1.0.0-py3-none-any.whl"
    markers = ("tomli>=2; python_version < '3.11'", "winapi; sys_platform == 'win32'", "optional; extra == 'a'")
    ours.write_bytes(wheel("edge_appliance", "1.0.0", {}, *markers, "web[fast]>=1"))
    web = wheel("web", "1.2", {}, "fastlib; extra == 'fast'", "x86only; platform_machine == 'x86_64'")
    folder = store(
        tmp_path / "wheels",
        ("tomli-2.0-py3-none-any.whl", wheel("tomli", "2.0", {})),
        ("web-1.2-py3-none-any.whl", web),
        ("web-1.3-py3-none-any.whl", web),
        ("fastlib-7-cp310-abi3-manylinux_2_28_aarch64.whl", wheel("fastlib", "7", {})),
    )
    pins = "tomli==2.0\nweb==1.2; python_version == '3.10'\nweb==1.3; python_version == '3.12'\nfastlib==7\n"
    chosen = {
        python: [path.name.split("-")[0] for path in overlay_wheels.resolve(python, ours, pins, folder)]
        for python in ("3.10", "3.12")
    }
    assert chosen == {
        "3.10": ["edge_appliance", "fastlib", "tomli", "web"],
        "3.12": ["edge_appliance", "fastlib", "web"],
    }
    assert folder / "web-1.3-py3-none-any.whl" in overlay_wheels.resolve("3.12", ours, pins, folder)


def test_a_wheel_of_another_processor_python_or_newer_glibc_does_not_get_into_an_image(tmp_path: Path) -> None:
    fitting = "fast-1-cp310-cp310-manylinux_2_28_aarch64.whl"
    others = ("cp310-cp310-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_aarch64", "cp310-cp310-win_arm64")
    names = [f"fast-1-{tags}.whl" for tags in (*others, "cp310-cp310-manylinux_2_39_aarch64", "py3-none-any")]
    ours = tmp_path / "edge_appliance-1.0.0-py3-none-any.whl"
    ours.write_bytes(wheel("edge_appliance", "1.0.0", {}, "fast"))
    folder = store(tmp_path / "wheels", *((name, wheel("fast", "1", {})) for name in (*names, fitting)))
    assert folder / fitting in overlay_wheels.resolve("3.10", ours, "fast==1\n", folder)


def test_a_wheel_that_was_torn_is_named_and_one_of_another_name_is_passed_over(tmp_path: Path) -> None:
    ours = tmp_path / "edge_appliance-1.0.0-py3-none-any.whl"
    ours.write_bytes(wheel("edge_appliance", "1.0.0", {}, "fast"))
    torn = ("fast-1-py3-none-any.whl", wheel("fast", "1", {})[:40])
    folder = store(tmp_path / "wheels", torn, ("my wheel.whl", b""))
    with pytest.raises(WorkshopError, match=r"fast-1-py3-none-any\.whl is no whole wheel: delete it"):
        overlay_wheels.resolve("3.10", ours, "fast==1\n", folder)


def test_a_package_without_a_pinned_version_is_named(tmp_path: Path) -> None:
    ours = tmp_path / "edge_appliance-1.0.0-py3-none-any.whl"
    ours.write_bytes(wheel("edge_appliance", "1.0.0", {}, "numpy"))
    with pytest.raises(WorkshopError, match=r"numpy has no version for Python 3\.12"):
        overlay_wheels.resolve("3.12", ours, "", tmp_path / "wheels")
