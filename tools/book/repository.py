#!/usr/bin/env python3
"""A preprocessor of mdBook: makes links that are right in the repository right in the book.

Pages in docs/ link to source files by relative paths. The book holds only docs/, so there these
links lead to the repository's web page. A README.md becomes an index.html, and links follow.
"""

import json
import posixpath
import re
import sys

LINK = re.compile(r"(\]\(|^\[[^\]]+\]: +)([^)\s#:]+)(?=[)\s#])", re.MULTILINE)


def rewrite(chapter, source, repository):
    def address(link):
        folder = posixpath.dirname(posixpath.join(source, chapter["path"] or ""))
        target = posixpath.normpath(posixpath.join(folder, link.group(2)))
        if target == source or target.startswith(source + "/"):
            return link.group(1) + re.sub(r"(^|/)README\.md$", r"\1index.md", link.group(2))
        return f"{link.group(1)}{repository}/blob/main/{target}"

    chapter["content"] = LINK.sub(address, chapter["content"])
    for item in chapter["sub_items"]:
        if "Chapter" in item:
            rewrite(item["Chapter"], source, repository)


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    context, book = json.load(sys.stdin)
    source = context["config"]["book"]["src"]
    repository = context["config"]["output"]["html"]["git-repository-url"]
    for item in book["sections"]:
        if "Chapter" in item:
            rewrite(item["Chapter"], source, repository)
    json.dump(book, sys.stdout)


main()
