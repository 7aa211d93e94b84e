"""What a host with Tenstorrent boards has and lacks, finding by finding.

Judges what `replicas.boards` found; nothing here opens a device.

Sources: hugepages from Tenstorrent's system setup, and from tt-umd that there must be one for each
device. Unsure: how many more of them help (four is Tenstorrent's own setting), and that a driver
since 1.29 needs none behind an IOMMU on every board.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from replicas.boards import (
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
from replicas.ttnn_package import OLDEST_FIRMWARE, PACKAGE, firmware_number, version_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.boards import Device

HUGEPAGES_PER_DEVICE = 4
WHEEL_PYTHONS = ((3, 10), (3, 12))

_NO_HUGEPAGES_DRIVER = (1, 29)

Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        level: "ok"; "note" for what is worth knowing; "missing" for what must be mended first.
        subject: What it is about, in a word or two.
        text: What is so.
        advice: What to do; one step an entry.
    """

    level: Level
    subject: str
    text: str
    advice: tuple[str, ...] = ()


def can_run_mesh(report: HostReport) -> bool:
    """Whether an engine on some mesh can start here, as far as can be told without trying."""
    has_boards = bool(report.usable) or report.mock_descriptor is not None
    return has_boards and all(f.level != "missing" for f in findings(report))


def findings(report: HostReport) -> tuple[Finding, ...]:
    """What is there and what is missing, board first; software only matters with a board."""
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
        text = f"none, and the mock cluster {mock} is no file"
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
        "the boards are there and no driver is loaded",
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
            "in a container: give it the nodes, for one `--device /dev/tenstorrent`",
            "else: look at `dmesg | grep tenstorrent`",
        )
    elif num_nodes < len(report.devices):
        text = f"{num_nodes} of {len(report.devices)} are given to us"
        yield _finding("note", "device nodes", text)
    closed = [d for d in report.devices if d.has_node and not d.is_usable]
    if closed:
        names = ", ".join(f"/dev/tenstorrent/{d.index}" for d in closed)
        level: Level = "note" if report.usable else "missing"
        advice = "install tt-kmd's udev rules, or `sudo chmod 666` the nodes"
        yield _finding(level, "device nodes", f"this user may not read and write {names}", advice)


def _firmware(report: HostReport) -> Iterator[Finding]:
    versions = sorted({d.firmware for d in report.devices if d.firmware is not None})
    too_old = [d for d in report.devices if d.firmware is not None and _is_too_old(d)]
    if not versions:
        yield _finding("note", "firmware", "version unknown", "`tt-smi` shows it")
    elif too_old:
        oldest = ", ".join(sorted({f"{d.firmware} on {d.arch}" for d in too_old}))
        wanted = ", ".join(f"{version} on {arch}" for arch, version in OLDEST_FIRMWARE.items())
        text = f"bundle {oldest}, and ttnn opens none before {wanted}"
        yield _finding("missing", "firmware", text, "bring the boards to a newer one with tt-flash")
    elif len(versions) == 1:
        yield _tested(report, "firmware", "bundle", versions[0], report.wanted.firmware)
    else:
        text = f"bundles {', '.join(versions)} side by side"
        yield _finding("note", "firmware", text, "bring all boards to one bundle with tt-flash")


def _is_too_old(device: Device) -> bool:
    oldest = OLDEST_FIRMWARE[device.arch] if device.arch is not None else ""
    return firmware_number(device.firmware) < firmware_number(oldest)


def _tested(
    report: HostReport, subject: str, what: str, version: str, wanted: str | None
) -> Finding:
    """A version, beside what ttnn was tested with; an older one is worth a note."""
    text = f"{what} {version}"
    if wanted is None:
        return _finding("ok", subject, text)
    text += f"; ttnn's list of releases names {wanted} (for {report.wanted.release})"
    number = firmware_number if subject == "firmware" else version_number
    is_older = number(version) < number(wanted)
    advice = ("bring it to that version, or a newer one",) if is_older else ()
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
            advice.append("delete what dead processes left: `ls /dev/hugepages-1G/*tenstorrent`")
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
    text = f"counts {num_counted} {RESOURCE} (everything in /dev/tenstorrent), and there are "
    advice = f"`ray start --resources '{{\"{RESOURCE}\": {num_nodes}}}'`"
    yield _finding("note", "Ray", f"{text}{num_nodes}", advice)


def _holders(report: HostReport) -> Iterator[Finding]:
    text = holders_text(report.devices)
    if text:
        yield _finding("note", "in use", text, "two processes on one board hang each other")


def _tt_smi(report: HostReport) -> Iterator[Finding]:
    """What resets boards, and what numbers mean to it and to ttnn."""
    tool = report.tt_smi
    if tool is None:
        text = "not on PATH: boards that a killed engine left open are not reset"
        yield _finding("note", "tt-smi", text, "`pip install tt-smi`")
        return
    if tool.version is None:
        text = f"{tool.path} says no version, and what its numbers mean depends on it"
        yield _finding("note", "tt-smi", text, "`pip install --upgrade tt-smi`")
        return
    meaning = (
        "`-r` takes device nodes, and a number is a place in the order of PCI addresses"
        if tool.takes_nodes
        else "`-r` takes the numbers of device nodes"
    )
    if any(d.is_galaxy for d in report.devices) and not tool.resets_galaxies:
        text = f"{tool.version} cannot reset a Galaxy, and its -r may drop all of its chips"
        yield _finding("note", "tt-smi", text, "`pip install --upgrade tt-smi`")
    else:
        yield _finding("ok", "tt-smi", f"{tool.version}: {meaning}")


def _numbers(report: HostReport) -> Iterator[Finding]:
    places = [(visible_number(report.devices, d), d.index) for d in report.devices if d.has_node]
    if any(place != index for place, index in places):
        text = ", ".join(f"{place} is /dev/tenstorrent/{node}" for place, node in sorted(places))
        yield _finding("note", "numbers", f"ttnn counts boards by their PCI addresses: {text}")


def _folders(report: HostReport) -> Iterator[Finding]:
    if not report.blocked_folders:
        yield _finding("ok", "caches", "converted weights and compiled kernels can be kept")
        return
    text = f"this user may not write in {', '.join(report.blocked_folders)}"
    advice = "give it the folders; mesh.weight_cache and TT_METAL_CACHE may name others"
    yield _finding("note", "caches", text, advice)


_BOARD_CHECKS = (
    _boards, _driver, _nodes, _numbers, _firmware, _hugepages, _ray_count, _tt_smi, _folders,
    _holders,
)  # fmt: skip


def _if_lacking(report: HostReport) -> Level:
    """How bad it is that software lacks, which only what opens a mesh needs."""
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
            text = "the compiler for kernels is not there"
            yield _finding(_if_lacking(report), "SFPI", text, install)
    elif report.is_sfpi_real:
        yield _sfpi_version(report, install)
    else:
        text = f"{report.sfpi} is a stand-in: enough for a mock device, not for a board"
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
        yield _finding("missing", "tt-metal", f"{text}, which is no folder", advice)


def _visible(report: HostReport) -> Iterator[Finding]:
    """What TT_VISIBLE_DEVICES leaves of the boards."""
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
        yield _finding("missing", subject, f"{text}, which is no board here", advice)
    elif strays:
        yield _finding("note", subject, f"{text}, and there is no {', '.join(strays)}", advice)
    else:
        yield _finding("note", subject, f"{text}: {len(report.usable)} of {len(opened)} boards")


def _mock_cluster(report: HostReport) -> Iterator[Finding]:
    if report.mock_descriptor is not None and report.devices:
        text = f"{MOCK_DESCRIPTOR} is set: ttnn opens no board"
        yield _finding("note", "mock cluster", text, "unset it to use the boards")


def devices_word(count: int) -> str:
    """The noun for so many of them."""
    return "device" if count == 1 else "devices"
