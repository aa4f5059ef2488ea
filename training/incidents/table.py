"""The table of a suite: for the README as Markdown, and its rows for any other form."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.training.incidents import words
from trimtab.training.incidents.incident import Verdict
from trimtab.training.incidents.suite import SuiteResult

BEGIN, END = "<!-- incidents -->\n", "<!-- /incidents -->"
"""What the table lies between in a page."""
HEADS = ("figure", "before", "bound", "after", "bound", "held")


def rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """The figures of an incident, in the order of `HEADS`."""
    for finding in verdict.findings:
        figure = finding.figure
        yield (
            figure.words,
            words.figure(finding.before, figure.unit),
            words.bound(figure.reproduced, figure.unit),
            words.figure(finding.after, figure.unit),
            words.bound(figure.cured, figure.unit),
            words.met(finding),
        )


def verdict_words(verdict: Verdict) -> str:
    """For instance "reproduced, cured"."""
    parts = (
        "reproduced" if verdict.reproduced else "**not reproduced**",
        "cured" if verdict.cured else "**not cured**",
    )
    return ", ".join(parts)


def markdown(result: SuiteResult) -> str:
    """The table of all incidents as Markdown, with a line break at its end."""
    lines = [f"| incident, {HEADS[0]} | {' | '.join(HEADS[1:])} |", "| --- " * len(HEADS) + "|"]
    for verdict in result.verdicts:
        title = f"**{verdict.incident.key}. {verdict.incident.title}**: {verdict_words(verdict)}"
        lines.append(f"| {title} |" + " |" * (len(HEADS) - 1))
        lines += [f"| {' | '.join(row)} |" for row in rows(verdict)]
    return "\n".join(lines) + "\n"


def has_marks(page: str) -> bool:
    """Whether a page has a place for the table."""
    return 0 <= page.find(BEGIN) < page.find(END)


def in_page(page: str, made: str) -> str:
    """The page with the table that was made in its place."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"
