"""Folders that look like the root of a host with Tenstorrent boards."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from replicas.tt.boards import HUGEPAGES_FILE, HostReport, read_host


def take_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process's user have no home folder, as some users of containers."""

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


DEVICE_IDS = {"n": "0x401e", "p": "0xb140", "g": "0xfaca"}


@dataclass
class FakeHost:
    """A root folder, an environment and an interpreter, and what is found there."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    python: tuple[int, int] = (3, 12)

    def __post_init__(self) -> None:
        self.environment.setdefault("HOME", str(self.root / "home"))

    @property
    def packages(self) -> Path:
        return self.root / "site-packages"

    def report(self) -> HostReport:
        return read_host(
            self.environment, root=self.root, python=self.python, packages=[str(self.packages)]
        )

    def write(self, path: str, text: str | bytes = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def add_board(
        self,
        card: str,
        *,
        has_driver: bool = True,
        is_named: bool = True,
        has_node: bool = True,
        firmware: str = "19.4.2.0",
        iommu: str = "identity",
        node: int | None = None,
    ) -> str:
        """One PCIe device at the next address, which is returned; `node` is its device node's N."""
        number = len(list((self.root / "sys/bus/pci/devices").glob("*")))
        address = f"0000:{number + 1:02x}:00.0"
        pci = f"sys/bus/pci/devices/{address}"
        self.write(f"{pci}/vendor", "0x1e52\n")
        self.write(f"{pci}/device", f"{DEVICE_IDS[card[0]]}\n")
        self.write(f"{pci}/iommu_group/type", f"{iommu}\n")
        number = number if node is None else node
        if has_driver:
            self.write("sys/module/tenstorrent/version", "2.9.0\n")
            attributes = f"{pci}/tenstorrent/tenstorrent!{number}"
            self.write(f"{attributes}/dev", "241:0\n")
            if is_named:
                self.write(f"{attributes}/tt_card_type", f"{card}\n")
                self.write(f"{attributes}/tt_fw_bundle_ver", f"{firmware}\n")
            self.write(f"proc/driver/tenstorrent/{number}/pids")
            if has_node:
                self.write(f"dev/tenstorrent/{number}")
        return address

    def add_hugepages(self, count: int) -> None:
        self.write(HUGEPAGES_FILE, f"{count}\n")
        (self.root / "dev/hugepages-1G").mkdir(parents=True)

    def add_ttnn(self, compiler: bytes | None = b"\x7fELF...", wants: str = "") -> None:
        """`wants`: what its metadata says of releases, and its file of the compiler."""
        metadata = f"Metadata-Version: 2.1\nName: ttnn\nVersion: 0.81.1\n\n{wants}\n"
        self.write("site-packages/ttnn-0.81.1.dist-info/METADATA", metadata)
        self.write("site-packages/ttnn/tt_metal/sfpi-version", wants)
        self.write("site-packages/ttnn/__init__.py", "raise AssertionError('imported')\n")
        if compiler is not None:
            tool = "site-packages/ttnn/runtime/sfpi/compiler/bin/riscv-tt-elf-g++"
            self.write(tool, compiler)

    def add_tt_smi(
        self, chips: list[dict[str, object]] | None = None, code: int = 0, version: str = "6.2.1"
    ) -> Path:
        """A tt-smi that says its version, and writes what else it is asked in the file returned."""
        snapshot = json.dumps({"device_info": chips or []})
        asked = self.root / "asked"
        tool = self.write(
            "bin/tt-smi",
            f'#!/bin/sh\nif [ "$1" = -v ]; then echo "{version}"; exit 0; fi\n'
            f'echo "$@${{TT_VISIBLE_DEVICES:+ on $TT_VISIBLE_DEVICES}}" >> {asked}\n'
            f"echo noise\necho '{snapshot}'\nexit {code}\n",
        )
        tool.chmod(0o755)
        self.environment["PATH"] = f"{self.root / 'bin'}{os.pathsep}/usr/bin:/bin"
        return asked

    def add_everything(self, *cards: str) -> None:
        """Boards, and all that they need."""
        for card in cards:
            self.add_board(card)
        self.add_hugepages(4 * len(cards))
        self.add_ttnn()
        self.add_tt_smi()
