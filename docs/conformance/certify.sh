#!/usr/bin/env bash
# Writes the certificates of this folder: docs/conformance/certify.sh [--all] [NAME…] from the root of the repository; with
# the name `none` only the table of them. A page is kept while it was made by the same suite of the same environment, and
# as it was made, so that an interrupted command continues; --all makes them anew.
set -u
copied=sandboxgym.conformance.baselines:deep_copied
mark() { # the last line of a page: what it was made of, and what was written
    echo "<!-- sources $1, page $(sha256sum < "$2" | cut -c 1-16) -->"
}
certify() {
    local name=$1
    shift
    ((${#chosen[@]} == 0)) || [[ " ${chosen[*]} " == *" $name "* ]] || return 0
    local page=docs/conformance/$name.md of
    of=$("${PYTHON:-.venv/bin/python}" conformance/sources.py "$@") || return
    if [ -z "$all" ] && [ -f "$page" ] && tail -n 1 "$page" | grep -qxF -- "$(mark "$of" <(head -n -2 "$page"))"; then
        echo "$name: kept"
        return 0
    fi
    rm -f "$page.part"
    "${PYTHON:-.venv/bin/python}" -m sandboxgym.conformance "$@" --markdown "$page.part" | tail -n 1 | sed "s/^/$name: /"
    if [ -s "$page.part" ]; then
        of=$(mark "$of" "$page.part")
        printf '\n%s\n' "$of" >> "$page.part"
        mv "$page.part" "$page"
    fi
}
all=""
if [ "${1:-}" = --all ]; then
    all=yes
    shift
fi
chosen=("$@")
# Control runs take these reset options in turn: seeds alone choose the task of the first, then each way to name one.
given() {
    options=(--reset-options '{}')
    for each in "$@"; do options+=(--reset-options "$each"); done
}
given '{"task": 3}' '{"game": 5}'
certify alfworld sandboxgym/ALFWorld-v0 "${options[@]}" --hook actions=sandboxgym.envs.alfworld.conformance_hooks:actions --html docs/conformance/alfworld.html
given '{"task": 3}' '{"goal": 5}'
certify webshop sandboxgym/WebShop-v0 "${options[@]}" --hook actions=sandboxgym.envs.webshop.conformance_hooks:actions --html docs/conformance/webshop.html
# Where steps are slow, these checks: those that another backend can change. The others see the same code as above.
only=(api restore.trace_equality restore.after_done restore.after_close freshness.render fork.trace_equality
    isolation.environment durable.round_trip durable.released resources.killed_owner concurrency.partial_fork)
given '{"task": 1}' '{"game": 2}'
certify alfworld-textworld sandboxgym/ALFWorld-v0 "${options[@]}" --make-kwargs engine=textworld --make-kwargs limit=3 "${only[@]/#/--only=}"
# A step in the browser takes 65 ms; it shows the pages of the engine that the text environment plays.
given '{"task": 3}' '{"goal": 5}'
certify webshop-browser sandboxgym/WebShopBrowser-v0 "${options[@]}" "${only[@]/#/--only=}"
probing=sandboxgym.envs.swebench.conformance_hooks
given '{"task": 1}' '{"instance_id": 2}'
hooks=("${options[@]}" --hook "actions=$probing:actions" --hook "shell=$probing:shell" --hook "limits=$probing:limits")
certify swebench-overlay sandboxgym/SWEBench-v0 --make-kwargs backend=overlay "${hooks[@]}" \
    --html docs/conformance/swebench-overlay.html
# The same in a namespace of an ordinary user, and by plain copies: what another backend can change.
certify swebench-rootless sandboxgym/SWEBench-v0 --make-kwargs backend=overlay-rootless "${hooks[@]}" \
    "${only[@]/#/--only=}" --only=probes
certify swebench-copy sandboxgym/SWEBench-v0 --make-kwargs backend=copy --make-kwargs allow_unsafe=true "${hooks[@]}" \
    "${only[@]/#/--only=}" --only=probes
# Any image with bash, git and a Python with pytest. A step through the daemon takes ten times as long as one without.
certify swebench-docker sandboxgym/SWEBench-v0 --make-kwargs backend=docker --make-kwargs "image=${IMAGE:-small:base}" \
    "${hooks[@]}" "${only[@]/#/--only=}" --only=probes
# Tasks in Harbor's format: the same episode on other images, with another grading.
probing=sandboxgym.envs.harbor.conformance_hooks
given '{"task": 1}'
hooks=("${options[@]}" --hook "actions=$probing:actions" --hook "shell=$probing:shell" --hook "limits=$probing:limits")
certify harbor-overlay sandboxgym/Harbor-v0 --make-kwargs backend=overlay "${hooks[@]}" \
    "${only[@]/#/--only=}" --only=probes
given '{"low": -0.1, "high": 0.1}'
certify cartpole-deepcopy $copied "${options[@]}" --make-kwargs id=CartPole-v1
given '{"low": -0.7, "high": -0.3}'
certify mountaincar-deepcopy $copied "${options[@]}" --make-kwargs id=MountainCar-v0
given '{"x_init": 1.0, "y_init": 0.5}'
certify pendulum-deepcopy $copied "${options[@]}" --make-kwargs id=Pendulum-v1
certify frozenlake-deepcopy $copied --make-kwargs id=FrozenLake-v1
certify taxi-deepcopy $copied --make-kwargs id=Taxi-v4
certify blackjack-deepcopy $copied --make-kwargs id=Blackjack-v1
certify cliffwalking-deepcopy $copied --make-kwargs id=CliffWalking-v1
replayed=sandboxgym.conformance.baselines:ReplaySnapshots
given '{"low": -0.1, "high": 0.1}'
certify cartpole-replay $replayed "${options[@]}" --make-kwargs id=CartPole-v1
given '{"task": 1}' '{"game": 2}'
certify textworld-replay $replayed "${options[@]}" --make-kwargs id=sandboxgym/ALFWorld-v0 --make-kwargs engine=textworld --make-kwargs limit=3 \
    "${only[@]/#/--only=}"
PYTHONPATH=conformance certify ale-breakout ale_states:breakout # needs ale-py

# The table of all certificates of this folder.
{
    echo "# Certificates"
    echo
    echo "Results of the [snapshot conformance suite](index.md), one run per line. The linked pages have every check, what it measured, and what was not tested."
    echo '`docs/conformance/certify.sh` runs the suite and writes this page. For comparison there are other ways to take snapshots. "Deep copies" are Gymnasium environments copied with'
    echo '`copy.deepcopy`, the obvious way: within a process it is faithful for these, and it declares nothing more.'
    echo '"Replays" restore such environments, and the original TextWorld, by repeating the reset and all actions so far.'
    echo 'The copy backend of SWE-bench isolates nothing and says so. Its one failure is that siblings see each other'"'"'s processes and `/dev/shm`.'
    echo '"Emulator states" is Atari with `clone_state` and `restore_state` (`conformance/ale_states.py`), which do not restore everything: most checks of restores fail.'
    echo
    echo 'The suite is named by a digest of its modules that decide on verdicts.'
    echo
    echo "| environment | result | suite | |"
    echo "|---|---|---|---|"
    for page in docs/conformance/*.md; do
        name=$(basename "$page" .md)
        if title=$(sed -n '1s/^# Snapshot conformance of //p' "$page") && [ -n "$title" ]; then
            title=$(sed -E 's/^sandboxgym\.conformance\.(adapters|baselines):deep_copied \{"id": "(.*)"\}$/\2, deep copies/; s/^sandboxgym\.conformance\.(adapters|baselines):ReplaySnapshots \{"id": "([^"]*)".*\}$/\2, replays/; s/^ale_states:breakout$/Breakout, emulator states/' <<< "$title")
            suite=$(sed -n '3s/.*; suite \([0-9a-f]*\),.*/\1/p' "$page")
            strength=$(sed -n 's/^Strength: \([^;]*\).*[.]$/ Strength: \1./p' "$page" | head -n 1)
            echo "| $title | $(sed -n '3s/; suite.*//;3s/, sandboxgym.*//;3s/; sandboxgym.*//;3p' "$page").$strength | ${suite:-before 2026-11-24} | [checks]($name.md)$([ -f "docs/conformance/$name.html" ] && echo ", [page]($name.html)") |"
        fi
    done
} > docs/conformance/certificates.md
