"""What another user of the machine could have put in place is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.foreign_files import give_away
from verl_ray.errors import UnsafeFile
from verl_ray.private_files import (
    _outer_user,
    create_private,
    open_private,
    private_folder,
    shared_folder,
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_made_for_this_user_alone_and_taken_again(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "own")
    assert mode_of(folder) == 0o700
    assert private_folder(folder) == folder and mode_of(shared_folder()) == 0o700


def test_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "own")
    give_away(folder)
    with pytest.raises(UnsafeFile) as refusal:
        private_folder(folder)
    assert str(refusal.value).startswith(f"{folder} has the mode d")
    assert "Have its owner or root remove it" in str(refusal.value)


def test_a_link_and_a_file_in_the_place_of_a_folder_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(private_folder(tmp_path / "own"))
    (tmp_path / "file").touch(0o600)
    for path in (link, tmp_path / "file"):
        with pytest.raises(UnsafeFile, match="expected a folder, user"):
            private_folder(path)
    with pytest.raises(UnsafeFile, match=r"Let this user write to .*missing"):
        private_folder(tmp_path / "missing" / "own")


def test_a_file_is_this_users_and_never_one_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with os.fdopen(create_private(path), "wb") as file:
        file.write(b"content")
    assert mode_of(path) == 0o600
    with os.fdopen(open_private(path), "rb") as file:
        assert file.read() == b"content"

    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(FileExistsError):
            create_private(taken)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("planted", ["foreign", "open to all", "link", "foreign pipe"])
def test_what_another_user_could_have_planted_is_not_opened(
    tmp_path: Path, planted: str
) -> None:
    path = tmp_path / "planted"
    if planted == "link":
        os.close(create_private(tmp_path / "own"))
        path.symlink_to(tmp_path / "own")
    elif planted == "foreign pipe":
        os.mkfifo(path, 0o600)
        give_away(path)
    else:
        os.close(create_private(path))
        path.chmod(0o622) if planted == "open to all" else give_away(path)
    with pytest.raises(UnsafeFile, match="so another user may have put it there"):
        open_private(path)


def test_users_of_containers_that_share_the_folder_are_told_apart() -> None:
    assert _outer_user(1000, "0 0 4294967295\n") == 1000
    assert _outer_user(1000, "0 100000 65536\n") == 101000
    # Rootless: root inside is the user outside.
    assert _outer_user(0, "0 1000 1\n1 100000 65536\n") == 1000
    assert _outer_user(7, "0 1000 1\n1 100000 65536\n") == 100006
