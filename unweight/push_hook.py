"""The model card that a loaded model's own ``push_to_hub`` publishes."""

from __future__ import annotations

import os
from pathlib import Path
from types import MethodType
from typing import Any

from .destination import find_base, refuse_what_is_closed
from .errors import HubError
from .format.bundle import is_bundle, open_directory
from .hub_access import download, parse_address, resolve
from .inspection import inspect
from .model_card import README, ParsedCard, bundle_facts, has_part, parse_card, write_card

# What transformers writes when a repository has no card yet.
_TEMPLATE = "This model card has been automatically generated."
# Both of transformers' ways to push end here, with everything written and nothing sent.
_LAST_STEP = "_upload_modified_files"


def publish_card_with(model: Any) -> None:
    """Make ``model.push_to_hub`` and ``save_pretrained(push_to_hub=True)`` publish the card of a compressed model.

    Only when what the model has saved is a bundle: a model that was decoded since has a card as any other.  A card that
    is in the repository is kept around ours; transformers' empty template is not.  Copies of the model behave the same.
    """

    def upload(self: Any, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **options: Any) -> Any:
        if is_bundle(working_dir):
            token = options.get("token")
            write_folder_card(
                working_dir, repo_id, origin=getattr(self, "name_or_path", ""),
                token=token if isinstance(token, str) else None,
            )  # fmt: skip
        return getattr(type(self), _LAST_STEP)(self, working_dir, repo_id, *args, **options)

    upload.__name__ = _LAST_STEP  # a pickled method is looked up by its name
    # A bound method, not a closure over the model: a deep copy binds it to the copy.
    setattr(model, _LAST_STEP, MethodType(upload, model))


def write_folder_card(
    folder: str | os.PathLike[str], repo_id: str, *, origin: str = "", token: str | None = None
) -> None:
    """Write ``README.md`` for a bundle that a model has saved.

    Args:
        folder: of the bundle; a card in it is kept around ours.
        repo_id: where it goes.
        origin: what the model was loaded from, a directory or a repository, whose card says what its base is.
        token: for the Hub.

    Raises:
        HubError: the base is gated or private, and the repository would be open to everybody.
        CheckpointError: a card can't be read.
    """
    path = Path(folder) / README
    card = parse_card(path.read_text(encoding="utf-8-sig"), str(path)) if path.is_file() else None
    if card is not None and _TEMPLATE in card.text:
        card = None
    origins = _card_of(origin, token) if origin else None
    is_ours = origins is not None and has_part(origins.text)
    base = None
    if origins is not None and is_ours and origins.base_models:
        base = origins.base_models[0]
        if not resolve(repo_id, None, token).private:
            refuse_what_is_closed(repo_id, find_base(base, token), None, token)
    with open_directory(folder) as bundle:
        facts = bundle_facts(bundle, inspect(folder), repo_id, base_model=base)
    # The card of a compressed model is ours to go on with; another one is that of the original.
    existing = card if card is not None else origins if is_ours else None
    path.write_text(write_card(facts, existing=existing, base=origins), encoding="utf-8")


def _card_of(origin: str, token: str | None) -> ParsedCard | None:
    """The card of a directory or of a repository, if it has one that is to be had."""
    path = Path(origin) / README
    if not Path(origin).exists():
        address = parse_address(origin)
        if address is None:
            return None
        try:
            repository = resolve(address.repo_id, address.revision, token)
            if not any(file.path == README for file in repository.files):
                return None
            path = Path(download(repository, README, token=token))
        except HubError:  # it was loaded from a cache, and is no longer there
            return None
    return parse_card(path.read_text(encoding="utf-8-sig"), f"{README} of {origin}") if path.is_file() else None
