"""Documents become passages whose ids name the file and the place in it."""

import os

import pytest

from jax_ragrl.corpus import formats
from jax_ragrl.corpus.formats import documents
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage

HTML = """<!doctype html><html><head><title>no</title><style>p {}</style></head><body>
<nav>Menu</nav><p>Before
the first.</p><h1>Guide <em>one</em></h1><p>A&amp;B</p><ul><li>x<li>y</ul>
<h2>Next</h2>last<script>var no;</script></body></html>"""
MARKDOWN = "# Guide\n\nHello.\n\n## Install it!\n```\n# no heading\n```\n## Install it!\nAgain\n"


def folder(path):
    (path / "sub").mkdir()
    (path / "sub" / "a.md").write_text(MARKDOWN, encoding="utf-8")
    (path / "b.html").write_text(HTML, encoding="utf-8")
    (path / "notes.txt").write_text("One, two\nthree\n", encoding="utf-8")
    (path / ".hidden.txt").write_text("no", encoding="utf-8")
    (path / "data.bin").write_bytes(b"\xff")
    return path


def test_a_folder_of_documents_is_a_corpus(tmp_path):
    assert formats.load_passages(folder(tmp_path)) == [
        Passage("b.html", "b", "Before the first."),
        Passage("b.html#guide-one", "Guide one", "A&B\nx\ny"),
        Passage("b.html#next", "Guide one - Next", "last"),
        Passage("notes.txt", "notes", "One, two\nthree"),
        Passage("sub/a.md#guide", "Guide", "Hello."),
        Passage("sub/a.md#install-it", "Guide - Install it!", "```\n# no heading\n```"),
        Passage("sub/a.md#install-it-1", "Guide - Install it!", "Again"),
    ]


def test_a_numbered_heading_and_repeated_ones_have_different_ids(tmp_path):
    headings = ("Example", "Example", "Example 1", "Example")
    (tmp_path / "a.md").write_text("".join(f"# {x}\n\ntext\n\n" for x in headings))
    places = [p.id.partition("#")[2] for p in formats.load_passages(tmp_path / "a.md")]
    assert places == ["example", "example-1", "example-1-1", "example-2"]


@pytest.mark.parametrize("name", ["b.html", "notes.txt", "sub/a.md"])
def test_a_document_alone_is_a_corpus(tmp_path, name):
    passages = formats.load_passages(folder(tmp_path) / name)
    assert passages and all(p.id.startswith(name.rpartition("/")[2]) for p in passages)
    with pytest.raises(UserError, match=r"holds passages \(documents\), not questions"):
        formats.load_questions(tmp_path / name)


def test_a_text_file_may_hold_records(tmp_path):
    (tmp_path / "x.txt").write_text('{"text": "a"}\n', encoding="utf-8")
    assert formats.load_passages(tmp_path / "x.txt") == [Passage("p0", "", "a")]


def pdf(texts):
    """The bytes of a PDF with one line of text per page."""
    count, objects = len(texts), ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(count))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {count} >>")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for n, text in enumerate(texts):
        resources = "/Resources << /Font << /F 3 0 R >> >> /MediaBox [0 0 300 99]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {resources} /Contents {5 + 2 * n} 0 R >>")
        stream = f"BT /F 12 Tf 9 9 Td ({text}) Tj ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    body, offsets = b"%PDF-1.4\n", []
    for n, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{n} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    end = f"trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    return body + f"xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode()


def test_the_passages_of_a_pdf_are_its_pages(tmp_path):
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf(["first page", "", "third page"]))
    assert formats.load_passages(tmp_path) == [
        Passage("a.pdf#page=1", "a", "first page"),
        Passage("a.pdf#page=3", "a", "third page"),
    ]


@pytest.mark.parametrize(
    "error", [NotImplementedError("a filter"), RecursionError(), KeyError("/W")]
)
def test_a_pdf_or_page_that_fails_in_any_way_is_named(tmp_path, monkeypatch, error):
    pypdf = pytest.importorskip("pypdf")
    (tmp_path / "a.txt").write_text("fine", encoding="utf-8")
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.4 nothing")
    with pytest.raises(UserError, match=r"b\.pdf: unreadable PDF"):
        formats.load_passages(tmp_path)
    (tmp_path / "b.pdf").write_bytes(pdf(["one", "two"]))
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(UserError, match=r"b\.pdf: unreadable PDF \(\S.*\): repair"):
        formats.load_passages(tmp_path)


def test_half_of_a_character_in_a_pdf_is_replaced(tmp_path, monkeypatch):
    pypdf = pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf(["one"]))
    monkeypatch.setattr(pypdf.PageObject, "extract_text", lambda _: "a\ud800b")
    assert formats.load_passages(tmp_path)[0].text == "a\ufffdb"


def test_a_link_out_of_a_folder_of_documents_is_refused(tmp_path):
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("fine", encoding="utf-8")
    (docs / "b.txt").symlink_to("a.txt")  # stays in the folder
    assert [p.id for p in formats.load_passages(docs)] == ["a.txt", "b.txt"]
    for target in ("../secret.txt", tmp_path / "secret.txt"):
        (docs / "leak.txt").symlink_to(target)
        with pytest.raises(UserError, match=r"leak\.txt is a link to .*secret\.txt, outside of"):
            formats.load_passages(docs)
        (docs / "leak.txt").unlink()
    # A link that the user names is the user's choice.
    (tmp_path / "link").symlink_to(docs)
    assert len(formats.load_passages(tmp_path / "link")) == 2


def test_a_document_without_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    (tmp_path / "b.txt").write_text(" \n", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"1 documents have no text, such as b\.txt"):
        assert len(formats.load_passages(tmp_path)) == 1


def test_shards_beside_a_document_are_named(tmp_path):
    """A list of checksums makes a folder of shards a folder of documents."""
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    (tmp_path / "sums.txt").write_text("f00 a.jsonl\n", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"as documents, .* such as .*/a\.jsonl, .*/\*\.jsonl"):
        assert [p.id for p in formats.load_passages(tmp_path)] == ["sums.txt"]


def test_the_name_of_a_document_that_is_not_utf_8_is_a_text(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.md", "w", encoding="utf-8") as file:
        file.write("text\n# Menu\nsoup")
    first, second = formats.load_passages(tmp_path)
    assert first == Passage("caf\ufffd.md", "caf\ufffd", "text")
    assert second == Passage("caf\ufffd.md#menu", "Menu", "soup")


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pypdf", None)
    (tmp_path / "a.pdf").write_bytes(pdf(["x"]))
    with pytest.raises(UserError, match=r"pip install 'jax_ragrl\[documents\]'") as error:
        formats.load_passages(tmp_path)
    assert "\n" not in str(error.value)


def test_what_holds_no_documents_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds neither a BEIR set .*\.pdf"):
        formats.load_passages(tmp_path)
    with pytest.raises(UserError, match=r"data\.bin lacks the suffix of a .*: give it alone"):
        formats.load_passages(f"{folder(tmp_path)}/sub/a.md,{tmp_path}/data.bin")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<head><body><p>a<div>b</span> c<script>no", "a b c"),
        ("a<![x[b", "a"),
        ("a<![CDATA[b]]>c", "ac"),
        ("a<!-- <p> -->b<!--> c <!---> d --!> e <!-- f --!> g", "ab c d --!> e g"),
        ("a<!-- b", "a"),
        ("a < b &lt; c <3 d", "a < b < c <3 d"),
        ("a <b", "a <b"),  # the page ends before it is a tag
        ('a <b c="d> e</b>', 'a <b c="d> e</b>'),
        ("<p title=\"x > y\" class='<b>' z=1>a", "a"),
        ('<b</="x>a', "a"),  # no value, but a name that begins with =
        ('<b c=d="e>f">a', 'f">a'),  # the quotes are in the value
        ("<script>if (a < b) '<p>no' </scripts></SCRIPT >a", "a"),
        ("<script/>a<svg/>b<svg><svg></svg>c", "abc"),
        ("</3>a</ b>c<?php d ?>e", "ace"),
        ("a&#65;&#x41;&#" + "9" * 5000 + ";&#xD800;", "aAA\ufffd\ufffd"),
    ],
)
def test_the_text_of_html_is_that_of_the_standard(page, text):
    (section,) = documents.html_sections(page)
    assert " ".join(section.text.split()) == text


REPEATED = ["<!--", "<![x[", "<svg>", "<svg><nav>", "</nav>", "<a ", "<a b='", '<a ="', "<", "</"]
REPEATED += ["<!", "<?", "<script>", "</script>", "<h1>", "&#", "&#1", "<a<", "<!-", "<!-->"]


@pytest.mark.slow
@pytest.mark.parametrize("text", REPEATED)
def test_a_page_of_one_repeated_text_takes_linear_time(text):
    """In quadratic time, most of them would take hours, and the fastest half a minute."""
    documents.html_sections(text * 100_000)
    documents.html_sections("<a " + text * 100_000)


@pytest.mark.parametrize("text", ["# ", "#\t", " # a", "`", "~~~ "])
def test_a_line_of_one_repeated_text_takes_linear_time(text):
    assert list(documents.markdown_sections(["# " + text * 200_000 + "x"]))
