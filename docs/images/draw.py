"""Draws the figures of the documentation as SVG files next to this script.

    python docs/images/draw.py

Colors come from CSS variables, so that a page in dark mode shows light lines; a file that is opened
by itself follows the system. Figures are narrow and tall: text stays readable on a phone.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).parent
WIDTH = 460
STYLE = """
  svg.drawing-svg { --ink: #1f2933; --soft: #6b7785; --a: #2f6fdf; --b: #c2571a; --c: #2b8a3e; }
  @media (prefers-color-scheme: dark) {
    svg.drawing-svg { --ink: #e6e9ee; --soft: #9aa5b1; --a: #7aa7ff; --b: #f0a070; --c: #7bd88f; }
  }
  .drawing-svg text { font: 14px system-ui, sans-serif; fill: var(--ink); }
  .drawing-svg .small { font-size: 13px; fill: var(--soft); }
  .drawing-svg .code { font: 13px ui-monospace, monospace; }
  .drawing-svg .bold { font-weight: 600; }
  .drawing-svg .box { fill: none; stroke: var(--ink); stroke-width: 1.5; }
  .drawing-svg .line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
  .drawing-svg .dash { stroke-dasharray: 4 3; }
  .drawing-svg .fa { fill: var(--a); fill-opacity: 0.22; stroke: var(--a); }
  .drawing-svg .fb { fill: var(--b); fill-opacity: 0.22; stroke: var(--b); }
  .drawing-svg .fc { fill: var(--c); fill-opacity: 0.22; stroke: var(--c); }
  .drawing-svg .f0 { fill: var(--soft); fill-opacity: 0.12; stroke: var(--soft); }
  .drawing-svg .head { fill: var(--soft); }
"""


class Figure:
    """Collects the elements of one drawing."""

    def __init__(self, title: str, height: int):
        self.title, self.height, self.items = title, height, list[str]()

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        lines: Sequence[str] | str = (),
        look: str = "",
    ) -> None:
        """A rounded rectangle with centered lines; the first line is bold, the others small."""
        lines = [lines] if isinstance(lines, str) else list(lines)
        look = f"box {look}".strip()
        self.items.append(f'<rect class="{look}" x="{x}" y="{y}" width="{w}" height="{h}" rx="7"/>')
        top = y + h / 2 - 8.5 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + 17 * i, line, "bold" if i == 0 else "small")

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "middle") -> None:
        """One line of text."""
        self.items.append(
            f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def note(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """One small line of text."""
        self.text(x, y, text, "small", anchor)

    def cell(self, x: float, y: float, w: float, h: float, text: str, look: str) -> None:
        """A small filled rectangle with one line."""
        self.items.append(
            f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4.5, text, "code")

    def line(self, *points: tuple[float, float], look: str = "", head: bool = True) -> None:
        """A polyline, with an arrow head at its end unless told otherwise."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        mark = ' marker-end="url(#arrow)"' if head else ""
        self.items.append(f'<polyline class="line {look}" points="{path}"{mark}/>')

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg class="drawing-svg" xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {WIDTH} {self.height}" aria-label="{escape(self.title)}">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
            "</defs>"
        )
        body = "\n".join(self.items)
        title = f"<title>{escape(self.title)}</title>"
        return f"{head}\n{title}\n<style>{STYLE}</style>\n{arrow}\n{body}\n</svg>\n"


# --- concepts ------------------------------------------------------------------------------------


def effects() -> Figure:
    f = Figure("A system and its effects", 430)
    f.box(130, 10, 200, 44, ["steps(question)", "a generator"], "f0")
    f.line((230, 54), (230, 84))
    f.box(130, 86, 200, 44, ["Execution", "suspended"], "fa")
    f.line((230, 130), (230, 160))
    f.note(240, 150, "effects")
    for i, (name, by, look) in enumerate(
        [
            ("Generate", "policy", "fa"),
            ("Search", "retriever", "fc"),
            ("CallLLM", "frozen LLM", "fb"),
            ("Done", "a leaf", "f0"),
        ]
    ):
        f.box(10 + 112 * i, 164, 104, 50, [name, by], look)
    f.line((62, 214), (62, 262), (180, 262))
    f.line((174, 214), (174, 242), (200, 242), (200, 250))
    f.line((286, 214), (286, 242), (260, 242), (260, 250))
    f.box(182, 252, 96, 44, ["replies", "one batch"], "f0")
    f.line((230, 296), (230, 328))
    f.note(240, 316, "advance(reply)")
    f.box(130, 330, 200, 44, ["next Execution", "one per branch"], "fa")
    f.line((330, 352), (455, 352), (455, 108), (332, 108))
    f.note(230, 400, "Only rollout/collect.py performs effects:", "middle")
    f.note(230, 418, "one batched call per kind and round.", "middle")
    return f


def forest() -> Figure:
    f = Figure("A forest of decisions", 330)
    f.box(170, 8, 120, 34, "question", "f0")
    xs = (80, 230, 380)
    for x, name in zip(xs, ("no retrieval", "retrieve", "plan"), strict=True):
        f.line((230, 42), (x, 70))
        f.box(x - 60, 72, 120, 40, [name, "router"], "fa")
    f.line((68, 112), (68, 246))
    for x in (170, 272):
        f.line((230, 112), (x, 140))
        f.box(
            x - 46, 142, 92, 40, ["docs 1, 3", "filter"] if x < 200 else ["docs 2", "filter"], "fa"
        )
        f.line((x, 182), (x, 246))
    f.line((380, 112), (380, 140))
    f.box(332, 142, 96, 40, ["search", "decision"], "fa")
    f.line((380, 182), (380, 246))
    for x, r in ((68, "0"), (170, "1"), (272, "0"), (380, "1")):
        f.box(x - 42, 248, 84, 40, [f"reward {r}", "leaf"], "fc" if r == "1" else "fb")
    f.note(230, 312, "Siblings are the actions tried in one state: a decision.", "middle")
    return f


def credit() -> Figure:
    f = Figure("Credit: one number per node", 300)
    f.box(180, 8, 100, 40, ["action", "credit 0.50"], "fa")
    for x, v in ((70, "1.00"), (310, "0.33")):
        f.line((230, 48), (x, 84))
        f.box(x - 55, 86, 110, 40, ["action", f"credit {v}"], "fa")
    f.line((70, 126), (70, 184))
    for x in (200, 306, 412):
        f.line((310, 126), (x, 184))
    for x, r in ((70, 1), (200, 0), (306, 1), (412, 0)):
        f.box(x - 44, 186, 88, 40, [f"reward {r}", "leaf"], "fc" if r else "fb")
    f.note(230, 254, "reachable_leaves: mean reward of the leaves below a node.", "middle")
    f.note(230, 272, "With a group rule, siblings or whole rollouts are", "middle")
    f.note(230, 290, "compared instead, and credit is an advantage.", "middle")
    return f


def objective() -> Figure:
    f = Figure("From credit to a gradient", 420)
    rows = [
        (["credit per action", "one number per node"], "fa"),
        (["reward per token", "credit at the last token, minus KL (optional)"], "f0"),
        (["advantage per token", "GAE with a critic, or the credit itself"], "f0"),
        (["surrogate loss per token", "PPO, dual clip, policy gradient, or your own"], "fb"),
        (["weights per token", "aggregation: token_mean, sequence_mean, role_sum"], "fb"),
        (["gradient", "KL in the loss and entropy added; AdamW"], "fc"),
    ]
    for i, (lines, look) in enumerate(rows):
        y = 8 + 68 * i
        f.box(45, y, 370, 46, lines, look)
        if i + 1 < len(rows):
            f.line((230, y + 46), (230, y + 66))
    return f


def packing() -> Figure:
    f = Figure("Packed rows: contexts that begin alike share their tokens", 330)
    f.note(10, 20, "Three contexts of one prompt, laid out one per row:")
    for i, (name, look) in enumerate((("A", "fb"), ("B", "fc"), ("C", "fa"))):
        y = 30 + 30 * i
        f.cell(10, y, 200, 24, "prompt", "f0")
        f.cell(212, y, 90, 24, name, look)
        f.cell(304, y, 146, 24, "padding", "line dash")
    f.note(10, 146, "The same contexts in one packed row:")
    f.cell(10, 156, 180, 26, "prompt", "f0")
    for x, name, look in ((192, "A", "fb"), (274, "B", "fc"), (356, "C", "fa")):
        f.cell(x, 156, 80, 26, name, look)
    f.note(10, 212, "What each segment attends to:")
    for i, (name, look) in enumerate((("A", "fb"), ("B", "fc"), ("C", "fa"))):
        y = 222 + 28 * i
        f.text(18, y + 16, name, "code")
        f.cell(34, y, 156, 22, "prompt", "f0")
        f.cell(192 + 82 * i, y, 80, 22, name, look)
    f.note(
        230, 322, "Positions restart at the prompt's end: siblings do not see each other.", "middle"
    )
    return f


def sampler() -> Figure:
    f = Figure("The sampler: prefill once, fork, decode", 390)
    f.box(10, 10, 440, 40, ["requests of many states", "padded to a few static shapes"], "f0")
    f.line((230, 50), (230, 74))
    f.box(110, 76, 240, 42, ["prefill", "each prompt once"], "fa")
    for x in (90, 230, 370):
        f.line((230, 118), (x, 146))
        f.box(x - 60, 148, 120, 42, ["sibling", "key = (state, i)"], "fa")
        f.line((x, 190), (x, 216))
    f.box(10, 218, 440, 42, ["decode", "many steps per program, no host synchronization"], "fb")
    f.line((230, 260), (230, 284))
    f.box(10, 286, 210, 46, ["cache doubles", "128, 256, 512, ..."], "f0")
    f.box(240, 286, 210, 46, ["batch shrinks", "finished rows leave"], "f0")
    f.note(230, 358, "A token depends on its prompt, key and position alone:", "middle")
    f.note(230, 376, "batching does not change what is sampled.", "middle")
    return f


def mesh() -> Figure:
    f = Figure("The device mesh: data, fsdp, tensor", 330)
    for i in range(2):
        x = 10 + 226 * i
        f.items.append(f'<rect class="box f0" x="{x}" y="34" width="214" height="190" rx="7"/>')
        f.text(x + 107, 24, f"data {i}", "bold")
        for r in range(2):
            for c in range(2):
                f.box(
                    x + 12 + 98 * c,
                    56 + 82 * r,
                    90,
                    66,
                    [f"device {4 * i + 2 * r + c}", f"fsdp {r}", f"tensor {c}"],
                    "fa" if c == 0 else "fb",
                )
    f.note(230, 250, "mesh = (2, 2, 2) on eight devices", "middle")
    f.note(230, 274, "Rows of a batch are split over data and fsdp,", "middle")
    f.note(230, 292, "weights over fsdp and tensor. Gradients are summed", "middle")
    f.note(230, 310, "over data; weights are gathered within fsdp.", "middle")
    return f


# --- systems -------------------------------------------------------------------------------------


def c3po() -> Figure:
    f = Figure("C-3PO: a proxy between a frozen retriever and a frozen language model", 420)
    f.box(160, 8, 140, 34, "question", "f0")
    f.line((230, 42), (230, 62))
    f.box(150, 64, 160, 42, ["router", "policy"], "fa")
    for x, name in ((70, "[No Retrieval]"), (230, "[Retrieval] query"), (390, "[Planning]")):
        f.line((230, 106), (x, 138))
        f.text(x, 154, name, "code")
    f.line((390, 162), (390, 184))
    f.box(322, 186, 136, 42, ["decision maker", "roadmap by LLM"], "fa")
    f.line((230, 162), (230, 246))
    f.line((390, 228), (390, 246))
    f.box(170, 248, 276, 38, ["search", "frozen retriever"], "fc")
    f.line((310, 286), (310, 304))
    f.box(200, 306, 220, 42, ["filter: [i, j]", "policy"], "fa")
    f.line((420, 327), (456, 327), (456, 232), (440, 232), (440, 228))
    f.line((70, 162), (70, 372))
    f.line((310, 348), (310, 372))
    f.box(10, 374, 440, 38, ["answer", "frozen language model"], "fb")
    return f


def mmoa_rag() -> Figure:
    f = Figure("MMOA-RAG: rewriter, selector and generator in a line", 420)
    steps = [
        (["rewriter", "policy: one sub-question per line"], "fa"),
        (["search", "retriever: k passages shared by the queries"], "fc"),
        (["selector", "policy: Document0,Document4 (grammar mask)"], "fa"),
        (["generator", "policy: **answer**"], "fa"),
        (["reward", "F1 of the answer to every role, minus own penalties"], "f0"),
    ]
    f.box(160, 8, 140, 34, "question", "f0")
    for i, (lines, look) in enumerate(steps):
        y = 64 + 72 * i
        f.line((230, y - 22), (230, y - 2))
        f.box(50, y, 360, 48, lines, look)
    return f


def coda() -> Figure:
    f = Figure("CoDA: planner and executor with separate contexts", 330)
    f.text(115, 20, "planner's context", "bold")
    f.text(345, 20, "executor's context", "bold")
    f.items.append('<rect class="box f0" x="8" y="30" width="214" height="230" rx="7"/>')
    f.items.append('<rect class="box f0" x="238" y="30" width="214" height="230" rx="7"/>')
    for y, name, look in ((44, "question", "f0"), (92, "<task>", "fa"), (172, "<result>", "fc")):
        f.box(30, y, 170, 34, name, look)
    f.box(30, 216, 170, 34, "<answer>", "fa")
    f.line((200, 109), (258, 61))
    f.box(260, 44, 170, 34, "sub-question", "f0")
    f.line((345, 78), (345, 90))
    f.box(260, 92, 170, 34, "<search>", "fa")
    f.line((345, 126), (345, 138))
    f.box(260, 140, 170, 34, "documents", "fc")
    f.line((345, 174), (345, 186))
    f.box(260, 188, 170, 34, "<refine> <answer>", "fa")
    f.line((260, 205), (202, 190))
    f.note(230, 284, "One policy plays both. The planner sees results alone.", "middle")
    f.note(230, 302, "All turns of a rollout share one advantage, compared", "middle")
    f.note(230, 320, "with the other rollouts of the question.", "middle")
    return f


def mao_arag() -> Figure:
    f = Figure("MAO-ARAG: a planner over frozen executors", 400)
    f.box(160, 8, 140, 34, "question", "f0")
    f.line((230, 42), (230, 62))
    f.box(120, 64, 220, 42, ["planner", "policy: a comma list"], "fa")
    for x in (90, 230, 370):
        f.line((230, 106), (x, 136))
    f.box(10, 138, 138, 56, ["QR,R,DS,AG", "one workflow"], "f0")
    f.box(161, 138, 138, 56, ["QDS", "serial parts"], "f0")
    f.box(312, 138, 138, 56, ["QDP", "parallel parts"], "f0")
    for x in (230, 380):
        f.line((x, 194), (x, 220))
    f.box(161, 222, 289, 42, ["planner, once per sub-question", "policy: a workflow each"], "fa")
    f.line((80, 194), (80, 292))
    f.line((306, 264), (306, 292))
    f.box(10, 294, 440, 42, ["executors", "frozen LLM and retriever; each has a price"], "fb")
    f.line((230, 336), (230, 352))
    f.box(50, 354, 360, 40, ["reward", "F1 minus alpha x (tokens, searches, turns)"], "f0")
    return f


def opera() -> Figure:
    f = Figure("OPERA: plan, analysis and rewrite, each with its own policy and reward", 430)
    f.box(160, 8, 140, 34, "question", "f0")
    f.line((230, 42), (230, 62))
    f.box(120, 64, 220, 42, ["plan", "policy 1: list of sub-goals"], "fa")
    f.line((230, 106), (230, 136))
    f.note(240, 126, "each sub-goal")
    f.box(120, 138, 220, 40, ["search", "retriever"], "fc")
    f.line((230, 178), (230, 206))
    f.box(120, 208, 220, 42, ["analysis", "policy 2: yes + answer, or no"], "fa")
    f.line((230, 250), (230, 282))
    f.note(240, 270, "no")
    f.box(120, 284, 220, 42, ["rewrite", "policy 3: another query"], "fb")
    f.line((120, 305), (60, 305), (60, 158), (118, 158))
    f.line((340, 229), (410, 229), (410, 356))
    f.note(346, 220, "yes")
    f.box(250, 358, 202, 40, ["answer", "of the last sub-goal"], "f0")
    f.note(230, 420, "Roles learn one after the other, from groups at their decisions.", "middle")
    return f


FIGURES: dict[str, Callable[[], Figure]] = {
    "effects": effects,
    "forest": forest,
    "credit": credit,
    "objective": objective,
    "packing": packing,
    "sampler": sampler,
    "mesh": mesh,
    "c3po": c3po,
    "mmoa_rag": mmoa_rag,
    "coda": coda,
    "mao_arag": mao_arag,
    "opera": opera,
}


def main() -> None:
    """Writes every figure."""
    for name, figure in FIGURES.items():
        (HERE / f"{name}.svg").write_text(figure().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
