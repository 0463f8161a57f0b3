"""Blocks as Markdown (figures are files beside it) and as one self-contained HTML page (figures inside)."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from torchspec_core.plots.style import inline
from torchspec_core.report.document import Block, Code, Heading, Picture, Sample, Table, Text

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --ink: #1a1d21; --soft: #5a6068; --page: #ffffff; --line: #d9dde2; --shade: #f4f6f8; --mark: #cfe5d8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e8eb; --soft: #a2a9b1; --page: #16181b; --line: #363b41; --shade: #202328; --mark: #2c5741; }} }}
body {{ margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 56rem; color: var(--ink); background: var(--page);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin-top: 2.6rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }}
p {{ max-width: 46rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }}
th {{ color: var(--soft); font-weight: 600; white-space: nowrap; }}
td.number, th.number {{ text-align: right; white-space: nowrap; }}
figure {{ margin: 1.2rem 0; }}
figure svg {{ height: auto; max-width: 100%; }}
figcaption {{ color: var(--soft); font-size: .85rem; }}
pre {{ background: var(--shade); border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem;
  overflow-x: auto; font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
code {{ background: var(--shade); border-radius: 4px; padding: .1em .3em; font-size: .9em; }}
details {{ border: 1px solid var(--line); border-radius: 6px; margin: .7rem 0; padding: .5rem .9rem; }}
mark {{ background: var(--mark); color: inherit; border-radius: 3px; }}
summary {{ cursor: pointer; }}
.said {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.who {{ color: var(--soft); font-size: .85rem; margin-bottom: 0; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""

_NUMBER = re.compile(r"[\d.,±% —-]*")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fence(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Table(header, rows):
            lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (header, *rows)]
            return "\n".join([lines[0], "|" + " --- |" * len(header), *lines[1:]])
        case Picture(file, caption, _):
            return f"![{caption}]({file})"
        case Code(text):
            return f"{_fence(text)}\n{text}\n{_fence(text)}"
        case Sample(title, prompt, pieces):
            answer = "".join(text for text, _ in pieces)
            fence = max(_fence(prompt), _fence(answer), key=len)
            return f"**{title}**\n\nPrompt:\n\n{fence}\n{prompt}\n{fence}\n\nAnswer:\n\n{fence}\n{answer}\n{fence}"


def markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown; pictures are named by their files, which belong beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _rich(text: str) -> str:
    """Escaped text with `code` spans."""
    parts = html.escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{_rich(text)}</p>"
        case Table(header, rows):
            kinds = [
                ' class="number"' if all(_NUMBER.fullmatch(cell) for cell in column) else ""
                for column in zip(*rows, strict=True)
            ]
            head, *body = [
                "<tr>"
                + "".join(f"<{tag}{kind}>{_rich(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True))
                + "</tr>"
                for tag, row in (("th", header), *(("td", row) for row in rows))
            ]
            table = f"<table>\n<thead>{head}</thead>\n<tbody>\n{''.join(body)}\n</tbody>\n</table>"
            return f'<div class="scroll">{table}</div>'
        case Picture(_, caption, svg):
            label = html.escape(caption)
            return f"<figure>\n{inline(svg, label)}<figcaption>{label}</figcaption>\n</figure>"
        case Code(text):
            return f"<pre>{html.escape(text, quote=False)}</pre>"
        case Sample(title, prompt, pieces):
            answer = "".join(
                f"<mark>{html.escape(text, quote=False)}</mark>" if flag else html.escape(text, quote=False)
                for text, flag in pieces
            )
            said = "".join(
                f'<p class="who">{who}</p>\n<p class="said">{text}</p>\n'
                for who, text in (("Prompt", html.escape(prompt, quote=False)), ("Answer", answer))
            )
            return f"<details>\n<summary>{html.escape(title)}</summary>\n{said}</details>"


def page(blocks: Sequence[Block]) -> str:
    """The page as HTML with its figures inside: one file to send to someone."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "report")
    return _PAGE.format(title=html.escape(title), body="\n".join(_html(block) for block in blocks))
