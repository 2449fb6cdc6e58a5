"""mreader push-to-hub. The Hub's client is imported by the command: it takes a while."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mreader.cli.console import counted, err, hide_hub_progress, out, print_json, progress
from mreader.cli.options import AugmentedPath, Json, Quiet, Token, Verbose, verbosity
from mreader.inspection import inspect_checkpoint
from mreader.progress import Progress
from mreader.verify import verify

if TYPE_CHECKING:
    from mreader.card import CardFacts


def push_command(
    path: AugmentedPath,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub, like me/Qwen3-30B-A3B-mreader.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to publish on; created where it is missing.")] = None,
    commit_message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of a commit.")] = False,
    token: Token = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Verify an augmented checkpoint and publish it with a model card. Run again, it resumes."""
    from mreader.hub import push_to_hub

    level = verbosity(quiet, verbose)
    hide_hub_progress(level)
    with progress(level) as bar:
        result = push_to_hub(
            path,
            repo,
            verify=lambda folder: verify(folder, progress=bar),
            facts=lambda folder: gather_facts(folder, bar),
            private=private,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            token=token,
        )
    if json:
        print_json(asdict(result))
        return
    out.print(result.url)
    if not quiet:
        if result.uploaded or result.deleted:
            err.print(f"{counted(len(result.uploaded), 'file')} in commit {result.commit}")
        for note in result.notes:
            err.print(note)


def gather_facts(folder: Path, bar: Progress) -> "CardFacts":
    """What the card says: what the files hold, with the table of budgets and the quality of sketch and recovery map."""
    from mreader.card import read_facts

    found = inspect_checkpoint(folder, progress=bar)
    facts = read_facts(folder)
    return replace(facts, budgets=found.budgets, sketch_error=found.sketch_error, energy_kept=found.energy)
