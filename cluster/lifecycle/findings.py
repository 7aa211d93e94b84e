"""Findings on a host with Tenstorrent boards: present, missing and outdated parts.

Evaluates a report of `replicas.tt.boards`; opens no device.

Sources: hugepages are from Tenstorrent's system setup; that each device needs at least one is from
tt-umd. Uncertain: how many more help (Tenstorrent's setup has four), and whether drivers since 1.29
need none behind an IOMMU with every board.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from replicas.tt.boards import (
    HUGEPAGES_FILE,
    METAL_HOME,
    MOCK_DESCRIPTOR,
    RESOURCE,
    VISIBLE_DEVICES,
    HostReport,
    holders_text,
    named,
    visible_number,
)
from replicas.tt.ttnn_package import OLDEST_FIRMWARE, PACKAGE, firmware_number, version_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.tt.boards import Device

HUGEPAGES_PER_DEVICE = 4
WHEEL_PYTHONS = ((3, 10), (3, 12))

_NO_HUGEPAGES_DRIVER = (1, 29)

Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        level: "ok", "note" (worth knowing) or "missing" (must be fixed first).
        subject: Its subject, in a word or two.
        text: The finding.
        advice: Steps to take, one an entry.
    """

    level: Level
    subject: str
    text: str
    advice: tuple[str, ...] = ()


def can_run_mesh(report: HostReport) -> bool:
    """Return whether an engine on some mesh can probably start here; nothing is tried."""
    has_boards = bool(report.usable) or report.mock_descriptor is not None
    return has_boards and all(f.level != "missing" for f in findings(report))


def findings(report: HostReport) -> tuple[Finding, ...]:
    """Return all findings, the boards first. Missing software is only a note without boards."""
    of_boards = _BOARD_CHECKS if report.devices else (_no_boards,)
    checks = (*of_boards, _ttnn, _sfpi, _metal_home, _visible, _mock_cluster)
    return tuple(finding for check in checks for finding in check(report))


def _finding(level: Level, subject: str, text: str, *advice: str) -> Finding:
    return Finding(level, subject, text, advice)


def _no_boards(report: HostReport) -> Iterator[Finding]:
    mock = report.mock_descriptor
    if mock is None:
        text = "none: no PCI device of Tenstorrent's (vendor 1e52)"
        advice = "if there should be one: check its slot and power, then `lspci -d 1e52:`"
        yield _finding("note", "boards", text, advice)
    elif report.has_mock_descriptor:
        text = f"none; ttnn's mock cluster {mock} stands in: it computes nothing"
        yield _finding("note", "boards", text)
    else:
        text = f"none, and the mock cluster {mock} does not exist"
        advice = f"unset {MOCK_DESCRIPTOR}, or point it at a cluster descriptor"
        yield _finding("missing", "boards", text, advice)


def _boards(report: HostReport) -> Iterator[Finding]:
    counts = Counter(d.board or f"unnamed {d.arch or 'unknown'}" for d in report.devices)
    text = ", ".join(f"{n} {board} {devices_word(n)}" for board, n in sorted(counts.items()))
    num_foreign = sum(d.arch is None for d in report.devices)
    if num_foreign:
        level: Level = "missing" if num_foreign == len(report.devices) else "note"
        yield _finding(level, "boards", text, "ttnn runs Wormhole and Blackhole chips only")
    elif any(d.board is None for d in report.devices):
        advice = "install tt-smi, or a newer driver, to have them named"
        yield _finding("note", "boards", text, advice)
    else:
        yield _finding("ok", "boards", text)


def _driver(report: HostReport) -> Iterator[Finding]:
    if report.driver is not None:
        wanted = report.wanted.driver if report.driver else None
        yield _tested(report, "driver", "tt-kmd", report.driver or "of unknown version", wanted)
        return
    yield _finding(
        "missing",
        "driver",
        "there are boards, but no driver is loaded",
        "if tt-kmd is installed: `sudo modprobe tenstorrent`",
        "if not: install it with DKMS from github.com/tenstorrent/tt-kmd",
    )


def _nodes(report: HostReport) -> Iterator[Finding]:
    if report.driver is None:
        return
    num_nodes = sum(d.has_node for d in report.devices)
    if not num_nodes:
        yield _finding(
            "missing",
            "device nodes",
            "none under /dev/tenstorrent",
            "in a container: pass them, for example with `--device /dev/tenstorrent`",
            "otherwise: look at `dmesg | grep tenstorrent`",
        )
    elif num_nodes < len(report.devices):
        text = f"{num_nodes} of {len(report.devices)} are visible here"
        yield _finding("note", "device nodes", text)
    closed = [d for d in report.devices if d.has_node and not d.is_usable]
    if closed:
        names = ", ".join(f"/dev/tenstorrent/{d.index}" for d in closed)
        level: Level = "note" if report.usable else "missing"
        advice = "install tt-kmd's udev rules, or `sudo chmod 666` the nodes"
        yield _finding(level, "device nodes", f"this user cannot read and write {names}", advice)


def _firmware(report: HostReport) -> Iterator[Finding]:
    versions = sorted({d.firmware for d in report.devices if d.firmware is not None})
    too_old = [d for d in report.devices if d.firmware is not None and _is_too_old(d)]
    if not versions:
        yield _finding("note", "firmware", "version unknown", "`tt-smi` shows it")
    elif too_old:
        oldest = ", ".join(sorted({f"{d.firmware} on {d.arch}" for d in too_old}))
        wanted = ", ".join(f"{version} on {arch}" for arch, version in OLDEST_FIRMWARE.items())
        text = f"bundle {oldest}; ttnn needs at least {wanted}"
        yield _finding("missing", "firmware", text, "update the boards with tt-flash")
    elif len(versions) == 1:
        yield _tested(report, "firmware", "bundle", versions[0], report.wanted.firmware)
    else:
        text = f"bundles {', '.join(versions)} side by side"
        yield _finding(
            "note", "firmware", text, "flash the same bundle to all boards with tt-flash"
        )


def _is_too_old(device: Device) -> bool:
    oldest = OLDEST_FIRMWARE[device.arch] if device.arch is not None else ""
    return firmware_number(device.firmware) < firmware_number(oldest)


def _tested(
    report: HostReport, subject: str, what: str, version: str, wanted: str | None
) -> Finding:
    """Return a finding that compares a version with the one that ttnn was tested with."""
    text = f"{what} {version}"
    if wanted is None:
        return _finding("ok", subject, text)
    text += f"; ttnn's list of releases names {wanted} (for {report.wanted.release})"
    number = firmware_number if subject == "firmware" else version_number
    is_older = number(version) < number(wanted)
    advice = ("update it to that version or a newer one",) if is_older else ()
    return _finding("note" if is_older else "ok", subject, text, *advice)


def _hugepages(report: HostReport) -> Iterator[Finding]:
    count, each = len(report.devices), report.num_hugepages // len(report.devices)
    text = f"{report.num_hugepages} of 1 GiB, {each} for each of {count} {devices_word(count)}"
    free = report.num_free_hugepages
    if report.has_iommu and version_number(report.driver) >= _NO_HUGEPAGES_DRIVER:
        yield _finding("ok", "hugepages", f"{text}; none are needed behind the IOMMU")
        return
    wanted = HUGEPAGES_PER_DEVICE * count
    advice = []
    if free is not None and free < min(count, report.num_hugepages):
        text += f", {free} free"
        if not any(d.holders for d in report.devices):
            advice.append("delete files of dead processes: `ls /dev/hugepages-1G/*tenstorrent`")
    if report.num_hugepages < wanted:
        advice.append(f"`echo {wanted} | sudo tee /{HUGEPAGES_FILE}`, at best right after boot")
    if not report.has_hugepage_mount:
        text += ", not mounted on /dev/hugepages-1G"
        advice.append(
            "`sudo mkdir -p /dev/hugepages-1G && sudo mount -t hugetlbfs -o pagesize=1G,mode=777 "
            "hugetlbfs-1G /dev/hugepages-1G`"
        )
    level: Level = "note" if advice else "ok"
    if report.num_hugepages < count or not report.has_hugepage_mount:
        level = "missing"
    yield _finding(level, "hugepages", text, *advice)


def _ray_count(report: HostReport) -> Iterator[Finding]:
    num_nodes, num_counted = sum(d.has_node for d in report.devices), report.num_ray_devices
    if num_counted == num_nodes:
        yield _finding("ok", "Ray", f"counts {num_nodes} {RESOURCE}")
        return
    text = f"counts {num_counted} {RESOURCE} (every file in /dev/tenstorrent), but there are "
    advice = f"`ray start --resources '{{\"{RESOURCE}\": {num_nodes}}}'`"
    yield _finding("note", "Ray", f"{text}{num_nodes}", advice)


def _holders(report: HostReport) -> Iterator[Finding]:
    text = holders_text(report.devices)
    if text:
        yield _finding("note", "in use", text, "two processes on one board make each other hang")


def _tt_smi(report: HostReport) -> Iterator[Finding]:
    """Describe tt-smi, which resets boards, and how it numbers them."""
    tool = report.tt_smi
    if tool is None:
        text = "not on PATH: boards that a killed engine left open will not be reset"
        yield _finding("note", "tt-smi", text, "`pip install tt-smi`")
        return
    if tool.version is None:
        text = f"{tool.path} reports no version, and how it numbers boards depends on the version"
        yield _finding("note", "tt-smi", text, "`pip install --upgrade tt-smi`")
        return
    meaning = (
        "`-r` takes device nodes; a number is a position in the order of PCI addresses"
        if tool.takes_nodes
        else "`-r` takes the numbers of device nodes"
    )
    if any(d.is_galaxy for d in report.devices) and not tool.resets_galaxies:
        text = f"{tool.version} cannot reset a Galaxy: its -r may make all chips disappear"
        yield _finding("note", "tt-smi", text, "`pip install --upgrade tt-smi`")
    else:
        yield _finding("ok", "tt-smi", f"{tool.version}: {meaning}")


def _numbers(report: HostReport) -> Iterator[Finding]:
    places = [(visible_number(report.devices, d), d.index) for d in report.devices if d.has_node]
    if any(place != index for place, index in places):
        text = ", ".join(f"{place} is /dev/tenstorrent/{node}" for place, node in sorted(places))
        yield _finding("note", "numbers", f"ttnn numbers boards by their PCI addresses: {text}")


def _folders(report: HostReport) -> Iterator[Finding]:
    if not report.blocked_folders:
        yield _finding("ok", "caches", "converted weights and compiled kernels can be stored")
        return
    text = f"this user cannot write to {', '.join(report.blocked_folders)}"
    advice = "change their owner, or set mesh.weight_cache and TT_METAL_CACHE to other folders"
    yield _finding("note", "caches", text, advice)


_BOARD_CHECKS = (
    _boards, _driver, _nodes, _numbers, _firmware, _hugepages, _ray_count, _tt_smi, _folders,
    _holders,
)  # fmt: skip


def _if_lacking(report: HostReport) -> Level:
    """Return the level of missing software: only engines on a mesh need it."""
    return "missing" if report.devices or report.mock_descriptor is not None else "note"


def _ttnn(report: HostReport) -> Iterator[Finding]:
    python = ".".join(map(str, report.python))
    install = f"`pip install {PACKAGE}`"
    if report.ttnn is not None:
        yield _finding("ok", "ttnn", f"{report.ttnn} on Python {python}")
    elif report.python in WHEEL_PYTHONS:
        yield _finding(_if_lacking(report), "ttnn", "not installed", install)
    else:
        fits = " or ".join(".".join(map(str, version)) for version in WHEEL_PYTHONS)
        text = f"not installed, and has no wheel for Python {python}"
        advice = f"make an environment with Python {fits}, install ttserve there, and {install}"
        yield _finding(_if_lacking(report), "ttnn", text, advice)


def _sfpi(report: HostReport) -> Iterator[Finding]:
    install = "install SFPI from github.com/tenstorrent/sfpi, in the version that ttnn asks for"
    if report.sfpi is None:
        if report.ttnn is not None:
            text = "the kernel compiler is not installed"
            yield _finding(_if_lacking(report), "SFPI", text, install)
    elif report.is_sfpi_real:
        yield _sfpi_version(report, install)
    else:
        text = f"{report.sfpi} is a stub: enough for a mock device, not for a board"
        if report.mock_descriptor is not None or not report.devices:
            yield _finding("note", "SFPI", text)
        else:
            yield _finding("missing", "SFPI", text, install)


def _sfpi_version(report: HostReport, install: str) -> Finding:
    found, wanted = report.sfpi_version, report.wanted.sfpi
    text = report.sfpi or ""
    if found is not None:
        text = f"{found}, {text}"
    if wanted is None or found == wanted:
        return _finding("ok", "SFPI", text)
    if found is None:
        return _finding("ok", "SFPI", f"{text}, of unknown version; ttnn asks for {wanted}")
    return _finding("note", "SFPI", f"{text}; ttnn asks for {wanted}", install)


def _metal_home(report: HostReport) -> Iterator[Finding]:
    if report.metal_home is None:
        return
    text = f"{METAL_HOME} is {report.metal_home}"
    if report.has_metal_home:
        yield _finding("ok", "tt-metal", text)
    else:
        advice = "unset it, or point it at a tt-metal checkout"
        yield _finding("missing", "tt-metal", f"{text}, which is not a folder", advice)


def _visible(report: HostReport) -> Iterator[Finding]:
    """Describe the boards that TT_VISIBLE_DEVICES leaves visible."""
    if report.visible_devices is None:
        return
    subject, text = "visible devices", f"{VISIBLE_DEVICES} is {report.visible_devices!r}"
    opened = [d for d in report.devices if d.is_usable]
    strays = [n for n in report.visible_names if not named(report.devices, n)]
    numbers = sorted(str(visible_number(report.devices, d)) for d in opened)
    advice = f"unset it, or name boards that are here: {', '.join(numbers)}"
    if not opened or not report.visible_names or report.mock_descriptor is not None:
        yield _finding("note", subject, text)
    elif not report.usable:
        yield _finding("missing", subject, f"{text}, which names no board of this host", advice)
    elif strays:
        yield _finding("note", subject, f"{text}, but there is no {', '.join(strays)}", advice)
    else:
        yield _finding("note", subject, f"{text}: {len(report.usable)} of {len(opened)} boards")


def _mock_cluster(report: HostReport) -> Iterator[Finding]:
    if report.mock_descriptor is not None and report.devices:
        text = f"{MOCK_DESCRIPTOR} is set: ttnn opens no board"
        yield _finding("note", "mock cluster", text, "unset it to use the boards")


def devices_word(count: int) -> str:
    """Return the noun "device" in the number of `count`."""
    return "device" if count == 1 else "devices"
