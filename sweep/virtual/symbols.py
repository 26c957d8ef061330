"""Reads the dynamic symbols of ELF libraries: which CUDA calls PyTorch needs, and which the library answers."""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_DYNSYM = 11
_SYMBOL = struct.Struct("<IBBHQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")


def _dynamic_symbols(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields (name, defined here) of a 64-bit little-endian ELF file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF library")
        sections_at = struct.unpack_from("<Q", data, 0x28)[0]
        entry_bytes, count = struct.unpack_from("<HH", data, 0x3A)
        sections = [_SECTION.unpack_from(data, sections_at + i * entry_bytes) for i in range(count)]
        for _, kind, _, _, offset, size, link, _, _, _ in sections:
            if kind != _DYNSYM:
                continue
            names_at, names_bytes = sections[link][4], sections[link][5]
            names = data[names_at : names_at + names_bytes]
            for name_at, _, _, section, _, _ in _SYMBOL.iter_unpack(data[offset : offset + size]):
                end = names.index(b"\0", name_at)
                yield names[name_at:end].decode(), section != 0


def undefined(path: Path) -> set[str]:
    """The names that the library expects others to define."""
    return {name for name, here in _dynamic_symbols(path) if not here and name}


def defined(path: Path) -> set[str]:
    """The names that the library defines."""
    return {name for name, here in _dynamic_symbols(path) if here and name}
