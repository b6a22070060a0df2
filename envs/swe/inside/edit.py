"""The file editor, as a program that runs inside the sandbox.

Owns: view, create, str_replace, insert and put_back (what undo needs) on files of the tree.
Promises: reads and writes nothing outside the tree: the path is resolved, links included, and must lie in it; answers every request, also a
senseless one, with text.
Does not: remember anything. Reads one JSON object on stdin ({root, command, path, text, numbers}), writes one on stdout:
{text, changed, path, before}, ``before`` being the file's bytes in base64, or null when there was none.
"""

import base64
import itertools
import json
import os
import stat
import sys

MOST = 1_000_000  # bytes of a file that is edited
LINES = 400  # of a view
WIDTH = 1_000  # characters of a line in a view
ENTRIES = 200  # of a folder's view


class Refused(Exception):
    """A request that cannot be done; its text is the answer."""


def answer(request):
    """The answer to one request."""
    try:
        path = resolve(request["root"], request["path"])
        if request["command"] == "view":
            return {"text": view(request["root"], path, request["numbers"]), "changed": False}
        return change(path, request)
    except Refused as reason:
        return {"text": f"Error: {reason}", "changed": False}
    except (OSError, ValueError) as failure:
        return {"text": f"Error: {failure.__class__.__name__}: {getattr(failure, 'strerror', None) or failure}", "changed": False}
    except (RecursionError, MemoryError) as failure:  # a path of thousands of folders, a tree deeper than Python walks
        return {"text": f"Error: {failure.__class__.__name__}: the path or the file is too much for the editor", "changed": False}


def resolve(root, name):
    """The real path of ``name``, which may be relative to the tree. It must lie in the tree."""
    name = name.strip()
    if not name:
        raise Refused("the path is empty")
    path = os.path.join(root, name)
    real = os.path.realpath(path)
    if real != root and not real.startswith(root + "/"):
        raise Refused(f"{name} is outside {root}")
    return real


def view(root, path, numbers):
    """A file with line numbers, or a folder two levels deep."""
    if os.path.isdir(path):
        if numbers:
            raise Refused("view_range is for files, and this is a folder")
        return listing(path)
    lines = read(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    first, last = numbers or (1, -1)
    last = len(lines) if last == -1 else last
    if first < 1 or first > max(1, len(lines)) or last < first:
        raise Refused(f"view_range [{first}, {last}]: the file has {len(lines)} lines")
    last = min(last, len(lines))
    shown = [f"{n:6}\t{lines[n - 1][:WIDTH]}" for n in range(first, min(last, first + LINES - 1) + 1)]
    if last >= first + LINES:
        shown.append(f"[... {last - first - LINES + 1} more lines: use view_range ...]")
    return "\n".join(shown) or "(the file is empty)"


def listing(path):
    """Names in the folder, two levels deep, without hidden ones."""
    found = []
    for folder, names, files in os.walk(path):
        depth = os.path.relpath(folder, path).count("/") + (folder != path)
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "__pycache__")
        found += [os.path.join(folder, name) + "/" for name in names] + [os.path.join(folder, name) for name in files if name[0] != "."]
        if depth >= 1:
            names[:] = []
        if len(found) > 20 * ENTRIES:
            break
    more = f"\n[... {len(found) - ENTRIES} more ...]" if len(found) > ENTRIES else ""
    return "\n".join([path + "/", *sorted(found)[:ENTRIES]]) + more


def change(path, request):
    """Do create, str_replace, insert or put_back."""
    command, text, numbers = request["command"], request["text"], request["numbers"]
    there = os.path.lexists(path)
    if command == "create":
        if there:
            raise Refused("the file exists already: use str_replace")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write(path, text["file_text"].encode())
        return done(f"Created {path}.", path, None)
    if command == "put_back":
        if text["before"] is None:
            os.unlink(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write(path, base64.b64decode(text["before"]))
        return done(f"Undid the last edit of {path}.", path, None)
    old = read(path)
    if command == "str_replace":
        new, line = replaced(old, text["old_str"], text.get("new_str", ""))
        span = text.get("new_str", "").count("\n")
    else:
        new, line = inserted(old, numbers[0], text["new_str"])
        span = text["new_str"].count("\n")
    write(path, new.encode())
    lines = new.split("\n")
    shown = "\n".join(f"{n:6}\t{lines[n - 1][:WIDTH]}" for n in range(max(1, line - 3), min(len(lines), line + span + 3) + 1))
    return done(f"Edited {path}:\n{shown}", path, old.encode())


def replaced(old, what, by):
    """``old`` with its only ``what`` replaced, and the line where."""
    if not what:
        raise Refused("old_str is empty")
    count = old.count(what)
    if count != 1:
        where = [str(old.count("\n", 0, at) + 1) for at in itertools.islice(places(old, what), 10)]
        raise Refused("old_str is not in the file" if not count else f"old_str is not unique: it begins at lines {', '.join(where)}")
    if what == by:
        raise Refused("old_str and new_str are the same")
    return old.replace(what, by), old.count("\n", 0, old.index(what)) + 1


def places(text, what):
    """Where ``what`` begins in ``text``."""
    at = text.find(what)
    while at >= 0:
        yield at
        at = text.find(what, at + len(what))


def inserted(old, after, new):
    """``old`` with ``new`` as lines after line ``after``, and the first new line's number."""
    lines = [line + "\n" for line in old.split("\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    if after > len(lines):
        raise Refused(f"insert_line {after}: the file has {len(lines)} lines")
    if after and lines and not lines[after - 1].endswith("\n"):
        lines[after - 1] += "\n"
    return "".join([*lines[:after], new if new.endswith("\n") else new + "\n", *lines[after:]]), after + 1


def read(path):
    """The text of a plain file."""
    if not os.path.lexists(path):
        raise Refused(f"{path} does not exist")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refused(f"{path} is not a plain file")
        content = file.read(MOST + 1)
    if len(content) > MOST:
        raise Refused(f"{path} is larger than {MOST} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Refused(f"{path} is not a text file") from None


def write(path, content):
    """Write a plain file."""
    if len(content) > MOST:
        raise Refused(f"the file would be larger than {MOST} bytes")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refused(f"{path} is not a plain file")
        file.truncate(0)
        file.write(content)


def done(text, path, before):
    """The answer to a change."""
    return {"text": text, "changed": True, "path": path, "before": None if before is None else base64.b64encode(before).decode()}


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
