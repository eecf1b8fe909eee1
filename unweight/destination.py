"""Where a bundle may be published: the repository, the token's rights, and what the base's owner allows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import HubError
from .hub_access import Repository, client_options, hub_errors, is_offline, parse_address, resolve
from .model_card import ParsedCard


@dataclass(frozen=True, slots=True)
class Destination:
    """A repository that may be pushed to; ``repository`` is None when it has yet to be made.

    ``base`` is the model that the bundle was made from, if it is known.
    """

    repo_id: str
    revision: str | None
    repository: Repository | None
    private: bool
    base: Repository | None


def hub_source(src: str | os.PathLike[str]) -> str | None:
    """The repository that a checkpoint comes from, or None for a local one."""
    address = None if Path(src).exists() else parse_address(str(src))
    return address.repo_id if address else None


def find_destination(
    repo_id: str, *, private: bool = False, revision: str | None = None, yes: bool = False,
    base_model: str | None = None, token: str | None = None, base_card: ParsedCard | None = None,
) -> Destination:  # fmt: skip
    """Where a push would go.  Nothing is written, so it can be asked long before the bundle exists.

    Raises:
        HubError: one may not push there, or not these weights.
    """
    address = parse_address(repo_id, revision)
    if address is None:
        raise HubError(f"{repo_id!r} is no repository's name: give organisation/name.")
    repo_id, revision = address.repo_id, address.revision
    if is_offline():
        raise HubError(f"{repo_id} can't be written to, since offline mode is on (HF_HUB_OFFLINE=1): unset it.")
    with hub_errors(repo_id, writing=True):
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        if token is None and get_token() is None:
            raise HubError(
                f"pushing to {repo_id} needs a token: log in with `hf auth login`, or give --token or HF_TOKEN."
            )
        api = HfApi(token=token, **client_options())
        api.whoami()
        try:
            api.repo_info(repo_id)
            exists = True
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            exists = False
    repository = None
    if exists:
        repository = resolve(repo_id, revision, token)
        if private and not repository.private:
            raise HubError(
                f"{repo_id} is there already, and public: make it private in its settings, or leave --private."
            )
    elif revision not in (None, "main"):
        raise HubError(f"{repo_id} isn't there yet, so it has no revision {revision!r}: push without --revision first.")
    is_private = repository.private if repository else private
    base = None if base_model is None else find_base(base_model, token)
    if not is_private and not yes:
        refuse_what_is_closed(repo_id, base, base_card, token)
    return Destination(repo_id, revision, repository, is_private, base)


def find_base(base_model: str, token: str | None) -> Repository:
    """The repository that a bundle was made from.

    Raises:
        HubError: there is none.
    """
    address = parse_address(base_model)
    if address is None:
        raise HubError(f"the base model {base_model!r} is no repository's name: give organisation/name.")
    return resolve(address.repo_id, address.revision, token)


def refuse_what_is_closed(repo_id: str, base: Repository | None, card: ParsedCard | None, token: str | None) -> None:
    """A public copy would open what the base's owner has closed.

    Raises:
        HubError: the base is gated or private.
    """
    closed = None
    if base is not None:
        closed = f"{base.repo_id} is {'private' if base.private else 'gated'}" if base.private or base.gated else None
    elif card is not None:
        if card.is_gated:
            closed = "the original model's card asks for conditions to be accepted"
        for name in card.base_models:
            try:
                found = find_base(name, token)
            except HubError:  # the card may name what isn't, or no longer, on the Hub
                continue
            if found.private or found.gated:
                closed = f"{found.repo_id}, which the model's card names as its base, is gated or private"
    if closed:
        raise HubError(
            f"{closed}, but {repo_id} would be open to everybody. Push it with --private (private=True), or, if its "
            "licence allows it, with `unweight push --yes`."
        )
