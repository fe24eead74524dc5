"""Models on the Hugging Face Hub: `hf://owner/repo/file.gguf`, or `hf://owner/repo` for its usual file.

The download, its cache and its settings (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) are those of huggingface_hub:
what is there is not loaded again, and after a broken connection a download goes on where it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import TypeVar

from larql.errors import ModelError

SCHEME = "hf://"
_USUAL = "q4_k_m"  # the type that most people want, as file names say it
_NAME = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<file>.+))?")
_SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
T = TypeVar("T")


def download(name: str, *, quiet: bool) -> Path:
    """The local path of a model on the Hub, all its shards beside it; raises ModelError.

    Unless `quiet`, what has to be loaded shows bars on stderr, if that is a terminal.
    """
    match = _NAME.fullmatch(name.removeprefix(SCHEME))
    if match is None:
        raise ModelError(f"{name} names no model; write {SCHEME}owner/repo or {SCHEME}owner/repo/file.gguf")
    repo, revision, file = match["repo"], match["revision"], match["file"]
    if file is None or _SHARD.search(file):
        there = _asked(repo, partial(_list_files, repo, revision))
        file = _choose(repo, there) if file is None else file
        shards = _shards(repo, file, there)
    else:
        shards = [file]
    paths = [_asked(repo, partial(_fetch, repo, shard, revision, quiet=quiet)) for shard in shards]
    return paths[0]


def _choose(repo: str, files: Sequence[str]) -> str:
    """The file of a repository that is meant when none is named, of several shards the first."""
    firsts = [file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower()]
    firsts = [file for file in firsts if (shard := _SHARD.search(file)) is None or int(shard["number"]) == 1]
    usual = [file for file in firsts if _USUAL in file.lower()]
    found = usual or firsts
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(f"{repo} has no .gguf file; look for a repository of the model that has")
    raise ModelError(f"{repo} has several .gguf files; choose one, as {SCHEME}{repo}/FILE: {', '.join(sorted(found))}")


def _shards(repo: str, file: str, files: Sequence[str]) -> list[str]:
    """All shards that belong to a file, in order."""
    shard = _SHARD.search(file)
    if shard is None:
        return [file]
    stem, count = file[: shard.start()], shard["count"]
    names = [f"{stem}-{number:05}-of-{count}{file[-5:]}" for number in range(1, int(count) + 1)]
    if missing := sorted(set(names) - set(files)):
        raise ModelError(f"{repo} lacks {missing[0]}, so the model is not complete there")
    return names


def _list_files(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().list_repo_files(repo, revision=revision)
    except (OfflineModeIsEnabled, ConnectionError):
        if files := [file for cached, file, _ in cached_models() if cached == repo]:
            return files
        raise


def cached_models() -> list[tuple[str, str, int]]:
    """The .gguf files in the Hub's cache: repository, file, bytes."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    files = {
        (info.repo_id, file.file_path.relative_to(revision.snapshot_path).as_posix(), file.size_on_disk)
        for info in repos
        for revision in info.revisions
        for file in revision.files
        if info.repo_type == "model"
    }
    return sorted(entry for entry in files if entry[1].lower().endswith(".gguf"))


def _fetch(repo: str, file: str, revision: str | None, *, quiet: bool) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = quiet and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    finally:
        if silenced:
            enable_progress_bars()


def _asked(repo: str, ask: Callable[[], T]) -> T:
    """What `ask` gets from the Hub; whatever goes wrong becomes one line."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    place = f"{constants.ENDPOINT}/{repo}"
    level = logging.get_verbosity()
    logging.set_verbosity(ERROR)  # what it warns of while it tries again is in the error when it gives up
    try:
        return ask()
    except errors.GatedRepoError as error:
        raise ModelError(f"{place} wants its terms accepted: do so there, and set HF_TOKEN to your token") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"there is no {place}, or it is private and needs a token in HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{place} has no such revision") from error
    except errors.LocalEntryNotFoundError as error:
        cache = constants.HF_HUB_CACHE
        raise ModelError(f"{place} cannot be reached, and the file is not in the Hub's cache ({cache})") from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{place} has no such file") from error
    except Exception as error:  # of the network, of the disk, of the packages below
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")
        raise ModelError(f"{place} could not be loaded: {reason}; try again") from error
    finally:
        logging.set_verbosity(level)
