"""`recipe.json` of a run: its exact recipe, for programs. `resolved.yaml` has the same options for people.

    {"format": 1, "sha256": "…", "withheld": ["train.checkpoint_dir"], "recipe": {"model": {"name": …}, …}}

People never see a secret, so `resolved.yaml` is masked. A program never reads a masked text: a masked template makes
other rows. Only one thing is in neither file: the credentials of an address (`https://user:password@host/x`). They are
not saved at all; `withheld` lists the options that had some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trillora.errors import TrilloraError
from trillora.files.digests import json_digest
from trillora.files.read_json import read_json
from trillora.recipe.schema import Recipe
from trillora.secrets import secrets_of_url, without_secrets

MODE = 0o600  # templates and prompts are written as they are
MAX_BYTES = 4 << 20
# Options that hold an address which is opened.
_ADDRESSES = re.compile(r"((stages|phases)\.\d+\.)?data\.(path(\.\d+\.path)?|validation)|train\.checkpoint_dir")
_FLAG = re.compile(r"[\w.-]{1,40}=(true|false|0|1)")  # `?download=true` is not a credential


class RunFile(BaseModel):
    """The content of recipe.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1]
    sha256: str
    withheld: tuple[Annotated[str, Field(pattern=f"^({_ADDRESSES.pattern})$")], ...]
    recipe: dict[str, Any]

    def require(self, option: str, recipe: Recipe, file: Path) -> None:
        """Refuses an address without its credentials, in `option` or, if that is empty, anywhere. It may have been
        given again: then `recipe` has another one."""
        now, saved = dict(texts(recipe)), dict(_texts(self.recipe, ""))
        missing = [
            name
            for name in self.withheld
            if (not option or name == option or name.startswith(f"{option}.")) and now.get(name) == saved.get(name)
        ]
        if missing:
            raise TrilloraError(
                f"The address in {missing[0]} had credentials, which are not saved with a run.",
                where=str(file),
                do=f"give the whole address again: {' '.join(f'{name}=ADDRESS' for name in missing)}",
            )


def dump(recipe: Recipe) -> str:
    """The text of recipe.json."""
    values = {name: section for name, section in recipe.model_dump(mode="json").items() if section is not None}
    name = values["model"]["name"]
    if (folder := Path(name)).is_dir():  # a bare name counts from the current folder
        values["model"]["name"] = str(folder.absolute())
    addresses = [(option, text) for option, text in _texts(values, "") if _ADDRESSES.fullmatch(option)]
    withheld = [option for option, address in addresses if _has_credentials(address)]
    stored = _without_credentials(values, "", frozenset(withheld))
    content = {"withheld": withheld, "recipe": stored}
    return json.dumps({"format": 1, "sha256": json_digest(content), **content}, indent=1) + "\n"


def read(file: Path) -> RunFile:
    """The content of recipe.json, if it is what the run wrote."""
    do = "restore this file; the options of a run cannot be changed, but you can give some with KEY=VALUE"
    found = read_json(file, RunFile, do=do, max_bytes=MAX_BYTES)
    if json_digest({"withheld": list(found.withheld), "recipe": found.recipe}) != found.sha256:
        raise TrilloraError("This file has changed since the run wrote it.", where=str(file), do=do)
    return found


def texts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every text of a recipe with the name of its option, as in an override: `data.path.0.path`."""
    return _texts(recipe.model_dump(mode="json"), "")


def _texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{name}.{number}")


def _without_credentials(value: Any, name: str, withheld: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        inside = f"{name}." if name else ""
        return {key: _without_credentials(inner, f"{inside}{key}", withheld) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_credentials(inner, f"{name}.{number}", withheld) for number, inner in enumerate(value)]
    return without_secrets(value) if name in withheld else value


def _has_credentials(address: str) -> bool:
    """Whether a URL has a user, a password, or a query or fragment that may be a key."""
    scheme = address.partition("://")[0]
    if scheme not in ("http", "https"):  # `#` is a letter of a name there, and `?` a wildcard
        address = address.replace("#", "_")
        address = address if "=" in address else address.replace("?", "_")
    query = address.partition("?")[2]
    if query and all(map(_FLAG.fullmatch, query.split("&"))):
        address = address.removesuffix(f"?{query}")
    return bool(secrets_of_url(address))
