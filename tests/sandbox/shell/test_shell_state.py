"""The state of a shell: captured, applied to another shell, and equal there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox.sandboxes import any_box  # noqa: F401 - fixture

from sandboxgym.errors import SnapshotCorrupt
from sandboxgym.sandbox.base import SandboxError
from sandboxgym.sandbox.sandbox import Sandbox, make_sandbox
from sandboxgym.sandbox.shell.bash_session import Shell
from sandboxgym.sandbox.shell.state import MOST_VARIABLES, SECTIONS, Parser, ShellState, Variable, parse_limits

# fixtures of another module are arguments of the tests below
# ruff: noqa: F811

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}


class Pair:
    """Two shells in one sandbox: one to capture, and one new for each state."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.backend = sandbox.start().backend
        self.sandbox = sandbox

    def shell(self, state: ShellState | None = None) -> Shell:
        return Shell(self.backend, env=ENV, cwd="/", state=state)

    def captured(self, commands: str) -> ShellState:
        shell = self.shell()
        try:
            result = shell.execute(commands, timeout=20)
            assert not result.syntax_error, result.output
            assert not result.ended
            state = shell.state()
            assert state is not None
            return state
        finally:
            shell.close()

    def output(self, state: ShellState, command: str) -> str:
        shell = self.shell(state)
        try:
            return shell.execute(command, timeout=20).output
        finally:
            shell.close()


@pytest.fixture
def own_box() -> Iterator[Sandbox]:
    """A sandbox whose own shell is used: a `Pair` puts others in its place."""
    with make_sandbox(allow_unsafe=True) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def pair(any_box: Sandbox) -> Iterator[Pair]:
    yield Pair(any_box)


@pytest.mark.parametrize(
    ("commands", "question", "answer"),
    [
        ("cd /usr/bin; cd /tmp", "pwd; cd -", "/tmp\n/usr/bin\n"),
        ("mkdir ~/gone; cd ~/gone; rmdir ~/gone", "pwd", "/\n"),
        ("ln -s /usr ~/link; cd ~/link/bin", "echo ${PWD#$HOME}; pwd -P", "/link/bin\n/usr/bin\n"),
        ("x='a b'; export y=2; z=", 'echo "$x" $y "${z-unset}" "${w-unset}"; printenv x y', "a b 2  unset\n2\n"),
        (
            "x=$'two\\nlines\\t\"quoted\" \\'single\\' $y `z` \\\\'",
            'echo "$x"',
            "two\nlines\t\"quoted\" 'single' $y `z` \\\n",
        ),
        ("x=$'\\xff\\xfe'; y=grün", 'printf %s "$x" | od -An -tx1; echo $y', " ff fe\ngrün\n"),
        ("unset HOME TERM", "echo ${HOME-none} ${TERM-none}", "none none\n"),
        ("a=(one 'two three' [7]='(')", 'echo ${#a[@]} ${!a[@]}; echo "${a[1]}" "${a[7]}"', "3 0 1 7\ntwo three (\n"),
        ("declare -A m=(['a b']=1 [\")\"]=2 ['\"']=3)", "echo ${m['a b']} ${m[')']} ${m['\"']}", "1 2 3\n"),
        (
            "declare -a empty=(); declare -A none=()",
            "declare -p empty none",
            "declare -a empty=()\ndeclare -A none=()\n",
        ),
        (
            "declare -i n=5; readonly r=1; declare -l low=ABC; declare -u up",
            "n+=2; r=2; up=x; echo $n $r $low $up",
            None,
        ),
        ("target=value; declare -n ref=target", "ref=changed; echo $target; declare -p ref", None),
        ("declare unset_one; export unset_two", "declare -p unset_one unset_two", None),
        ("f() { echo f $1; }; g() { f in; }; export -f g", "g; bash -c 'type -t f g'", "f in\nfunction\n"),
        ("shopt -s extglob\nh() { [[ $1 == +(a|b) ]] && echo yes; }\nshopt -u extglob", "h ab; shopt extglob", None),
        ("i() {\n  cat <<'END'\n}\n$x\nEND\n}", "i", "}\n$x\n"),
        ("foo-bar() { echo odd; }", "foo-bar", "odd\n"),
        (
            "function a=b { echo odd; }; function [x { :; }; declare -ft a=b",
            "'a=b'; declare -f a=b; declare -F",
            None,
        ),
        (
            "a() { cat <<'E'\n}\ndeclare -ft zz\n__sg_x () \n{ \n}\nb () \n{\nE\n}; b() { echo b; } 2>&1\n"
            "declare -ft a",
            "a; b; declare -f a b; declare -F",
            None,
        ),
        # Values that were there before the attribute by which bash would change them, or fail to.
        (
            "x='1+'; y=1/0; n=5; i='n+1'; declare -ir x y; declare -i i; l=ABC; u=MiX; declare -lx l; declare -ru u",
            "declare -p x y i l u; i+=1; echo $i",
            None,
        ),
        ("a=('1+' B [7]=c); declare -ai a; m=([k]=v); declare -A m=([k]='/'); declare -iA m", "declare -p a m", None),
        ("c='q[$(echo ran >>~/ran)]'; declare -i c", "declare -p c; cat ~/ran 2>&1 | wc -l", None),
        ("export -n HOME PATH; export SHELLOPTS COLUMNS=77", "declare -p HOME PATH COLUMNS SHELLOPTS", None),
        ("POSIXLY_CORRECT=1", "set -o | grep posix; declare -p POSIXLY_CORRECT", None),
        ("alias alias='echo x' aa=true zz='two\nalias lines=z' -- -q='echo q'", "\\alias -p", None),
        ("alias() { echo mine >>~/mine; }; builtin alias aa=true", "builtin alias -p; cat ~/mine 2>&1 | wc -l", None),
        ("mkdir -p ~/$'a\nb'; cd ~/$'a\nb'; pushd /usr", "dirs -l -v; popd; pwd", None),
        ("trap 'echo got' USR1; trap 'echo d' DEBUG; alias trap='echo no'", "\\builtin trap -p", None),
        ('trap "echo it\'s" USR1; trap() { exit 4; }', "builtin trap -p; type -t trap", None),
        ("x=old; IFS=01; y=new; cd /usr", "echo $x $y $PWD; declare -p IFS", None),
        (
            "declare -a POSIXLY_CORRECT=(a); set -- p q; alias k=1",
            "declare -p POSIXLY_CORRECT; echo $#; alias -p",
            None,
        ),
        ("function -- { echo dashes; }; declare -ft -- --; unset HISTSIZE", "declare -F; echo ${HISTSIZE-none}", None),
        ("alias ll='ls -l' say='echo \"it'\\''s\"' echo='echo aliased'", "say; alias ll", None),
        ("shopt -s nullglob dotglob; shopt -u sourcepath", "shopt nullglob dotglob sourcepath", None),
        ("set -f -u -C -o pipefail", "echo $- * ; set -o | grep -E 'noglob|nounset|noclobber|pipefail'", None),
        ("umask 027", "umask", "0027\n"),
        ("ulimit -S -c 0; ulimit -S -n 99", "ulimit -n; ulimit -c", "99\n0\n"),
        ("trap 'echo \"bye\n$x\"' EXIT; trap '' USR1; trap 'echo err' ERR", "trap -p", None),
        ("trap 'echo debug' DEBUG; trap 'echo return' RETURN", "trap -p", None),
        ("set -- a 'b c' '' '*' $'new\\nline'", 'printf "<%s>" "$@"', "<a><b c><><*><new\nline>"),
        ("bash -c 'exit 42'", "echo $?", "42\n"),
        ("true some 'last one'", 'echo "$_"', "last one\n"),
        ("IFS=:; PS1='(venv) '; PS4='> '", 'echo "$IFS$PS1$PS4"', ":(venv) > \n"),
        ("PROMPT_COMMAND='echo mine'", 'echo "${PROMPT_COMMAND##*;}"', "echo mine\n"),
        ("OPTIND=3; BASH_ENV=/x; SECONDS=1000", "echo $OPTIND $BASH_ENV $((SECONDS / 100))", "3 /x 10\n"),
        ("set -e", "echo $-; set +e", None),
        ("set -x", "{ echo ${-//[^x]/}; set +x; } 2>/dev/null", "x\n"),
        (
            "declare -p () { :; }; cd() { builtin cd / ; }; unset -f declare; printf() { echo mine; }",
            "type -t cd printf",
            None,
        ),
        ("history -s one; history -s $'two\\n  2  lines'; history -s -- -x; history -d 1", "history", None),
        (
            "HISTTIMEFORMAT='%Y '; HISTCONTROL=ignoreboth; history -s ' a'; history -s b b",
            "HISTTIMEFORMAT= history",
            None,
        ),
        ("cd /usr; pushd /tmp; pushd '/usr/bin'; mkdir -p ~/'a b'; pushd ~/'a b'", "dirs; popd -n +1; popd; pwd", None),
        ("set -o posix; set +o posix; set -o noglob", "echo *", "*\n"),
        ("set -o nounset; set -- ; unset x", "echo ${x-none} $#", "none 0\n"),
    ],
)
def test_what_a_shell_has_another_one_gets(pair: Pair, commands: str, question: str, answer: str | None) -> None:
    """Without an expected answer: what the captured shell itself would have said."""
    if answer is None:
        shell = pair.shell()
        shell.execute(commands, timeout=20)
        state = shell.state()
        answer = shell.execute(question, timeout=20).output
        shell.close()
        assert answer
    else:
        state = pair.captured(commands)
    assert state is not None
    assert pair.output(state, question) == answer


def test_a_shell_that_its_state_ends_is_followed_by_one_without_code(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    state = replace(pair.captured("cd /usr; x=before"), functions=b"exit 4\n")
    shell = pair.shell(state)
    try:
        result = shell.execute("echo $x $PWD", timeout=20)
    finally:
        shell.close()
    assert (result.output, result.exit_code, result.replaced) == ("before /usr\n", 0, True)
    assert "without functions" in caplog.text


@pytest.mark.parametrize("functions", [b"f () (\n", b"x () { ((1/0)); }; declare -i x=1/0\n", b"'\n"])
def test_a_shell_that_cannot_take_all_of_a_state_has_what_comes_before_and_says_so(
    pair: Pair, caplog: pytest.LogCaptureFixture, functions: bytes
) -> None:
    state = replace(pair.captured("cd /usr; x=before"), functions=functions)
    shell = pair.shell(state)
    try:
        result = shell.execute("echo $x $PWD", timeout=20)
        again = shell.execute("echo $x", timeout=20)
    finally:
        shell.close()
    assert (result.output, result.exit_code, result.replaced) == ("before /usr\n", 0, True)
    assert (again.output, again.replaced) == ("before\n", False)
    assert "could not take all of the state" in caplog.text


def test_state_is_plain_data(pair: Pair) -> None:
    state = pair.captured("x=$'\\xff'; a=(1 2); f() { :; }; ulimit -S -n 50; trap 'echo' USR1")
    assert ShellState.from_plain(state.to_plain()) == state


def test_a_restored_shell_has_the_state_it_was_given(pair: Pair) -> None:
    state = pair.captured(
        "x=1; declare -A m=([a]=b); f() { echo; }; export -f f; alias a=b\n"
        "set -u; umask 7; set -- 1; trap ': x' USR1 DEBUG"
    )
    shell = pair.shell(state)
    shell.start()
    shell._settle()
    again = shell.state()
    shell.close()
    assert again is not None
    different = {name for name in again.variables if again.variables[name] != state.variables.get(name)}
    assert different <= {b"SECONDS"}
    assert replace(again, variables={}) == replace(state, variables={})


def test_restoring_calls_no_function_and_no_alias_of_the_user(pair: Pair) -> None:
    names = ["cd", "unset", "umask", "ulimit", "shopt", "declare", "trap", "printf"]
    functions = "; ".join(f"{name}() {{ builtin echo {name} >>~/called; }}" for name in names)
    state = pair.captured(f"{functions}; alias set='echo set >>~/called' builtin='echo builtin >>~/called'")
    assert pair.output(state, "type -t cd set builtin") == "function\nalias\nalias\n"
    assert pair.sandbox.run("cat ~/called").exit_code != 0


def test_what_the_plumbing_defines_is_no_part_of_the_state(pair: Pair) -> None:
    state = pair.captured("my__sg_x=1; PROMPT_COMMAND=own")
    plain = repr(state.to_plain()).replace("my__sg_x", "")
    assert "__sg_" not in plain
    assert state.variables[b"PROMPT_COMMAND"] == Variable("", b'"own"')
    assert b"PROMPT_COMMAND" not in pair.captured("true").variables


def test_readonly_and_internal_variables_do_not_break_a_restore(pair: Pair) -> None:
    state = pair.captured("export SHELLOPTS BASHOPTS; readonly PWD HOME; RANDOM=1; x=$RANDOM$SECONDS$LINENO; y=after")
    assert pair.output(state, "echo $y").endswith("after\n")


def test_a_large_state(pair: Pair) -> None:
    state = pair.captured(
        "big=$(head -c 1000000 /dev/zero | tr '\\0' x)\n"
        "for i in {1..2000}; do eval \"v$i='value $i'; f$i() { echo $i; }\"; done"
    )
    assert pair.output(state, "echo ${#big} $v1999; f2000") == "1000000 value 1999\n2000\n"


words = st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
odd = st.one_of(
    words,
    st.text(alphabet="\"'`$\\(){}[]=;&|<>!#~* \t\n\r\x01\x7fax", max_size=20),
    st.binary(max_size=10).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
)
variable_names = st.from_regex(r"(v_|V)[a-zA-Z0-9_]{0,8}", fullmatch=True)
values = st.one_of(
    odd.map(lambda value: ("", value)),
    odd.map(lambda value: ("-x", value)),
    odd.map(lambda value: ("-r", value)),
    st.integers(-(2**62), 2**62).map(lambda number: ("-i", str(number))),
    st.lists(odd, max_size=4).map(lambda items: ("-a", items)),
    st.dictionaries(odd.filter(bool), odd, max_size=4).map(lambda items: ("-A", items)),
)


def assignment(name: str, attribute: str, value: object) -> str:
    if isinstance(value, list):
        return f"declare -a {name}=({' '.join(map(shlex.quote, value))})"
    if isinstance(value, dict):
        pairs = "\n".join(f"k={shlex.quote(key)}; {name}[$k]={shlex.quote(item)}" for key, item in value.items())
        return f"declare -A {name}\n{pairs}"
    return f"declare {attribute} {name}={shlex.quote(str(value))}".replace("declare  ", "declare -- ")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(variable_names, values, max_size=6),
    st.dictionaries(st.from_regex(r"f_[a-z]{1,5}", fullmatch=True), odd, max_size=3),
    st.lists(odd, max_size=4),
)
def test_any_variables_functions_and_arguments(
    pair: Pair, variables: dict[str, tuple[str, object]], functions: dict[str, str], arguments: list[str]
) -> None:
    commands = [assignment(name, *value) for name, value in variables.items()]
    commands += [f"{name}() {{\n  printf %s {shlex.quote(text)}\n}}" for name, text in functions.items()]
    commands.append("set -- " + " ".join(map(shlex.quote, arguments)))
    shell = pair.shell()
    script = "\n".join(commands)
    shell.execute(script, timeout=30)
    state = shell.state()
    assert state is not None
    question = "\n".join([*(f"declare -p {name}" for name in variables), *functions, 'printf "<%q>" "$@"', "true"])
    expected = shell.execute(question, timeout=30)
    shell.close()
    assert set(variables) == {name.decode() for name in state.variables if name[:1] in b"vV"} - {""}
    plain = ShellState.from_plain(state.to_plain())
    assert pair.output(plain, question) == expected.output
    for name, (_, value) in variables.items():
        if isinstance(value, dict):
            assert pair.output(plain, f"echo ${{#{name}[@]}}") == f"{len(value)}\n"


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"cwd": b"/"},
        dict.fromkeys(SECTIONS, b""),
        {**dict.fromkeys(SECTIONS, b""), "status": 0, "variables": [[b"x", "x", "text"]], "limits": []},
        {**dict.fromkeys(SECTIONS, b""), "status": 0, "variables": [], "limits": [], "more": 1},
    ],
)
def test_what_is_no_state_is_refused(plain: object) -> None:
    with pytest.raises(SnapshotCorrupt):
        ShellState.from_plain(plain)


ALL = len(SECTIONS)


@pytest.mark.parametrize(
    "dump",
    [b"", b"/\0", b"\0" * ALL, b"\0" * (ALL - 1) + b"end\0", b"\0" * (ALL + 1) + b"end\0", b"\0no declaration\n" * ALL],
)
def test_an_incomplete_dump_is_refused(dump: bytes) -> None:
    with pytest.raises(SnapshotCorrupt, match=f"a shell's state in {ALL} sections and its end"):
        ShellState.parse(dump, limits={})


def test_a_state_is_not_mixed_with_a_longer_one_before_it(pair: Pair) -> None:
    """The files of a shell are written over: what is behind the end is of an earlier time."""
    shell = pair.shell()
    try:
        long = f"f() {{ echo {'word ' * 2000}; }}; A=$(seq 2000); trap 'echo {'x' * 5000}' USR1"
        for command in (long, "true"):
            shell.execute(command, timeout=20)
        for command in ("unset -f f; unset A; trap - USR1", "B=2"):  # the files of the state take turns
            shell.execute(command, timeout=20)
        state = shell.state()
    finally:
        shell.close()
    assert state is not None
    assert state.traps == b"" and state.functions == b"" and b"A" not in state.variables
    assert pair.output(state, 'echo "$B$A"; declare -F f; trap -p USR1') == "2\n"


def test_values_with_line_ends_as_older_versions_of_bash_print_them() -> None:
    variables = b'declare -x a="one\n\\"two\\" )"\ndeclare -a b=([0]="x\ndeclare -- y=1" [1]=")")\ndeclare -- c=""\n'
    sections = {**dict.fromkeys(SECTIONS, b""), "cwd": b"/\n", "variables": variables, "status": b"0"}
    state = ShellState.parse(b"\0".join([*sections.values(), b"end", b""]), limits={})
    assert state.variables == {
        b"a": Variable("x", b'"one\n\\"two\\" )"'),
        b"b": Variable("a", b'([0]="x\ndeclare -- y=1" [1]=")")'),
        b"c": Variable("", b'""'),
    }


PIECES = st.sampled_from(
    [
        *(b'declare -x a="one"\n', b'declare -x a="one\ntwo"\n', b"declare -x a\n", b"declare -- a=$'x'\n"),
        *(
            b'declare -- b=""\n',
            b'declare -a b=([0]="x\ndeclare -- y=1" [1]=")")\n',
            b"declare -a b=()\n",
            b"declare -- y=1\n",
        ),
        *(
            b'declare -- __sg_x="1"\n',
            b'declare -- PROMPT_COMMAND="date"\n',
            b'declare -- c="\ndeclare -- b=\\"\\"\n"\n',
        ),
        *(b'declare -- d="not closed\n', b"no declaration\n", b'declare -- e="x"y\n', b"declare -- e=", b"\n"),
    ]
)
TEXTS = {
    **{name: [b""] for name in SECTIONS},
    "cwd": [b"/\n"],
    "status": [b"0", b"7"],
    "functions": [b"", b"f () \n{ \n    :\n}\n__sg_f () \n{ \n    :\n}\n", b"g () \n{ \n    :\n}\n"],
    "function_attributes": [b"", b"declare -fx f\ndeclare -f __sg_f\n", b"declare -f g\n"],
    "shopts": [b"shopt -s extglob\n", b"shopt -u compat31\nshopt -s extglob\n"],
    "limits": [b"open files    (-n) 1024\n", b"open files    (-n) 512\n"],
    "history": [b"", b"    1  \x1els\n"],
}
DUMPS = st.fixed_dictionaries(
    {name: st.sampled_from(texts) for name, texts in TEXTS.items()} | {"variables": st.lists(PIECES).map(b"".join)}
)


@given(st.lists(DUMPS, min_size=2, max_size=5))
@settings(max_examples=300, deadline=None)
def test_what_was_read_before_changes_nothing(dumps: list[dict[str, bytes]]) -> None:
    def read(parser: Parser, sections: dict[str, bytes]) -> ShellState | str:
        try:
            return parser.parse(b"\0".join([*(sections[name] for name in SECTIONS), b"end", b""]))
        except SnapshotCorrupt as error:
            return str(error)

    limits = {"n": b"1024"}
    parser = Parser(limits)
    for sections in dumps:
        found, expected = read(parser, sections), read(Parser(limits), sections)
        assert found == expected
        if isinstance(found, ShellState) and isinstance(expected, ShellState):
            assert list(found.variables) == list(expected.variables)


@pytest.mark.parametrize("name", ["a-b", "__SG_x", "_", "compgen", "."])
def test_a_function_is_part_of_the_state_whatever_it_is_called(pair: Pair, name: str) -> None:
    shell = pair.shell()
    try:
        shell.execute(f"shopt -s nocasematch extglob; function {name} {{ echo called; }}", timeout=20)
        state = shell.state()
        shell.execute(f"unset -f {name}", timeout=20)
        without = shell.state()
    finally:
        shell.close()
    assert state is not None and without is not None and without.functions == b""
    assert pair.output(state, name) == "called\n"


def test_limits_are_parsed_by_letter() -> None:
    text = (
        b"core file size              (blocks, -c) 0\npipe size            (512 bytes, -p) 8\nopen files    (-n) 1024\n"
    )
    assert parse_limits(text) == {"c": b"0", "n": b"1024"}


def test_a_state_of_too_many_variables_is_refused(own_box: Sandbox) -> None:
    own_box.execute(f"for ((i = 0; i <= {MOST_VARIABLES}; i++)); do printf -v V$i 1; done")
    with pytest.raises(SandboxError, match=f"at most {MOST_VARIABLES:,} variables"):
        own_box.shell_state()
    own_box.execute(f"unset V0 V{MOST_VARIABLES} $(compgen -v V1)")
    state = own_box.shell_state()
    assert state is not None
    plain = state.to_plain()
    plain["variables"] = [[b"X%d" % number, "", b'"1"'] for number in range(MOST_VARIABLES + 1)]
    with pytest.raises(SnapshotCorrupt, match="variables"):
        ShellState.from_plain(plain)
