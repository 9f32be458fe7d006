"""Questions to a person at a terminal: with questionary's menus where they can be shown, as plain prompts elsewhere.

Each answer is checked where it is given, and asked for again until it will do. Ctrl-C at any question is a KeyboardInterrupt.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import Any, Callable, Optional, Sequence, Tuple

import typer

Check = Callable[[str], str]
"""What is wrong with an answer, for the person to read; "" if it will do."""

_POINTED = " » "  # What a menu has before each choice, or blanks; it cuts off what is longer than the terminal is wide.
_BREAK = "\n" + " " * len(_POINTED)


def can_ask() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _menus() -> Optional[Any]:
    """questionary, where a terminal can show its menus."""
    if os.environ.get("TERM", "") in ("", "dumb"):
        return None
    try:
        import questionary
    except ImportError:
        return None
    return questionary


def _prompt(question: str, **options: Any) -> Any:
    return _plainly(typer.prompt, question, **options)


def _plainly(ask: Callable[..., Any], question: str, **options: Any) -> Any:
    try:
        return ask(question, **options)
    except typer.Abort:
        raise KeyboardInterrupt from None


def choose(question: str, choices: Sequence[Tuple[str, str]]) -> str:
    """One of several.

    Args:
        choices: What is returned, and what is shown for it. The first is the default.
    """
    menus = _menus()
    if menus is not None:
        columns = shutil.get_terminal_size().columns - len(_POINTED) - 1
        options = [menus.Choice(_BREAK.join(textwrap.wrap(title, max(columns, 10))), value=value) for value, title in choices]
        # The menu would say what was chosen as it stands there, cut off.
        chosen = str(menus.select(question, choices=options, qmark="gpumesh:", erase_when_done=True).unsafe_ask())
        typer.echo(f"gpumesh: {question} {dict(choices)[chosen]}")
        return chosen
    typer.echo(question)
    for number, (_, title) in enumerate(choices, 1):
        typer.echo(f"  {number}  {title}")
    while True:
        number = int(_prompt("Which one", type=int, default=1))
        if 1 <= number <= len(choices):
            return choices[number - 1][0]
        typer.echo(f"There are {len(choices)} to choose from; type a number from 1 to {len(choices)}.")


def text(question: str, *, default: str = "", check: Optional[Check] = None) -> str:
    """A line of text, without blanks around it."""
    menus = _menus()
    while True:
        if menus is not None:
            answer = str(menus.text(question, default=default, qmark="gpumesh:").unsafe_ask())
        else:
            answer = str(_prompt(question, default=default, show_default=bool(default)))
        problem = check(answer.strip()) if check is not None else ""
        if not problem:
            return answer.strip()
        typer.echo(f"{problem}.")


def secret(question: str, *, check: Optional[Check] = None) -> str:
    """The same, and nothing of it is shown."""
    menus = _menus()
    while True:
        if menus is not None:
            answer = str(menus.password(question, qmark="gpumesh:").unsafe_ask())
        else:
            answer = str(_prompt(question, hide_input=True))
        problem = check(answer.strip()) if check is not None else ""
        if not problem:
            return answer.strip()
        typer.echo(f"{problem}.")


def confirm(question: str, *, default: bool = True) -> bool:
    """Yes or no."""
    menus = _menus()
    if menus is not None:
        return bool(menus.confirm(question, default=default, qmark="gpumesh:").unsafe_ask())
    return bool(_plainly(typer.confirm, question, default=default))
