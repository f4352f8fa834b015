"""Files whose size is not what can be read of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfl.plain_files import read_plain

SHORT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""A file that says to have a page and has a line."""


@pytest.mark.skipif(not SHORT.is_file(), reason="needs a Linux with transparent huge pages")
def test_a_file_that_ends_before_its_size_is_refused() -> None:
    with pytest.raises(OSError, match=r"it ends after \d+ of its 4,096 bytes"):
        read_plain(SHORT)


@pytest.mark.soak
def test_a_file_of_more_than_one_read_is_whole(tmp_path: Path) -> None:
    path, size = tmp_path / "large", 2**31 + 5
    with path.open("wb") as file:
        file.truncate(size - 3)
        file.seek(0, 2)
        file.write(b"end")
    found = read_plain(path)
    assert (len(found), found[-3:]) == (size, b"end")
