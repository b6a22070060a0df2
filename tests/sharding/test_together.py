"""A program of several processes is begun when all have compiled it."""

from typing import Any

from crl_jax.sharding.together import Together


class Program:
    """Stands for what ``jax.jit`` returns."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def lower(self, *args: Any) -> "Program":
        self.done.append(f"lower {args}")
        return self

    def compile(self) -> Any:
        self.done.append("compile")
        return lambda *args: self.done.append(f"run {args}") or "from the compiled one"

    def __call__(self, *args: Any) -> str:
        self.done.append(f"call {args}")
        return "from the program"


def test_all_compile_then_meet_then_run_and_later_only_run() -> None:
    program = Program()
    together = Together(program, lambda what: program.done.append(f"meet at {what}"), "the copy")
    assert [together(1), together(2)] == ["from the compiled one"] * 2
    assert program.done == ["lower (1,)", "compile", "meet at the copy", "run (1,)", "run (2,)"]


def test_one_process_calls_the_program_as_it_is() -> None:
    program = Program()
    assert Together(program, None, "the copy")(1) == "from the program"
    assert program.done == ["call (1,)"]
