# The inside of a persistent shell: definitions that shell.py sources once, with @DIR@ replaced by the shell's directory.
#
# A command arrives as the file `go`. What is typed is one fixed line (shell_process.py): it notes the state of the
# shell, switches to POSIX mode, and sources `go`, which evaluates the text and, as part of a group that was parsed
# before, __sg_late. That sends the status and captures the state. Nothing here forks, but after hostile commands.
#
# Whatever a user may have redefined or switched on must neither break these lines nor show them:
# - An assignment needs no builtin and switches to POSIX mode, where special builtins (eval, export, unset, ".") are found
#   before functions and no alias stands for a reserved word.
# - __sg_guard, called in that mode, sees to it that `builtin` and `enable` are no functions and that nothing is disabled.
#   What it put away is in place again while a command runs. From there on `builtin` leads to all others.
# - These functions are readonly. Variables cannot be protected: where one was made readonly the shell says no more, and
#   is replaced.
# - Traces, traps, -e and -C: hence muted groups, `|| \builtin :` outside of functions, and `>|`.

builtin unset HISTFILE
builtin set +o history
builtin history -c # the line that sources this
# Without job control nothing is said about jobs, as in a script. Ctrl-C then reaches the shell too, which ends the command.
builtin set +o monitor

__sg_nonce= __sg_status=0 __sg_last= __sg_flags=$- __sg_traps= __sg_slot=0 __sg_bash=$BASH __sg_kept= __sg_broken=
__sg_noted=1 __sg_said=1 __sg_trapped= # of the command: its flags and its status are known, its traps are
__sg_less= __sg_omitted= # whether large variables are left out of the state, and which were
__sg_prompts= # whether prompts are expanded during commands
__sg_inside= __sg_opts= __sg_posix= __sg_known= # of the mode that these lines run in
__sg_functions= __sg_own=0 # the names of all functions; the length of that if all are of this file
__sg_hidden= __sg_off= # functions called `builtin` or `enable`; builtins that are disabled
__sg_then=(__sg_pass)
__sg_plain=$'trap -- \'__sg_abort\' SIGRTMAX\n'

__sg_pass() { ((1)); }

# Note what the command left switched on, and change to POSIX mode.
__sg_enter() {
  if [[ ! $__sg_noted ]]; then __sg_flags=$- __sg_noted=1; fi
  if [[ ! $__sg_inside ]]; then
    __sg_opts=${BASHOPTS/:promptvars/} __sg_posix=${POSIXLY_CORRECT+x$POSIXLY_CORRECT} __sg_inside=1
  fi
  POSIXLY_CORRECT=y
}

# In POSIX mode: see to it that `builtin` is what it is, and leads to all others.
__sg_guard() {
  if \export -f builtin || \export -f enable; then
    __sg_hidden+=$'\n'$(
      \unset -f typeset
      \typeset -f builtin enable || { \unset -f declare; \declare -f builtin enable; }
    ) || ((1))
    \unset -f builtin enable || __sg_broken=1
  fi
  __sg_found=x # unless it is known that nothing is disabled
  { \builtin enable -n || \builtin printf x; \builtin printf '\0'; } 1<>@DIR@"/state.$((1 - __sg_slot))"
  \builtin mapfile -d '' -n 1 -t __sg_found <@DIR@"/state.$((1 - __sg_slot))"
  if [[ $__sg_found ]]; then __sg_repair; fi
}

# Before a command: again, if anything of the user's may have run since the command before.
__sg_look() {
  if [[ $__sg_traps != "$__sg_plain" || ${PROMPT_COMMAND[*]-} != "$__sg_hook" ]]; then __sg_guard; fi
}

__sg_repair() {
  __sg_names=$(\enable -n || \builtin compgen -A disabled || \builtin printf '?') || ((1))
  \enable builtin || ((1))
  __sg_off+=$'\n'${__sg_names//enable -n /}
  \builtin enable eval || ((1))
  if \builtin eval "\\builtin enable ${__sg_off//$'\n'/ }"; then return; fi
  # `enable` itself is disabled, which nothing undoes: what else is, stays so.
  for __sg_name in '?' . alias declare dirs eval exec export history mapfile printf pwd read return set shopt trap \
    ulimit umask unset; do
    if [[ $__sg_off$'\n' == *$'\n'"$__sg_name"$'\n'* ]]; then __sg_broken=1; fi
  done
}

# Leave that mode, and put back what it switched.
__sg_leave() {
  if [[ $__sg_posix ]]; then POSIXLY_CORRECT=${__sg_posix#x}; else \unset -v POSIXLY_CORRECT; fi
  if [[ $__sg_known != "x$__sg_opts" ]]; then
    __sg_known=x$__sg_opts __sg_on=() __sg_none=()
    for __sg_name in expand_aliases inherit_errexit interactive_comments sourcepath; do
      if [[ :$__sg_opts: != *:"$__sg_name":* ]]; then __sg_none+=("$__sg_name"); fi
    done
    if [[ :$__sg_opts: == *:shift_verbose:* ]]; then __sg_on=(shift_verbose); fi
  fi
  if ((${#__sg_on[@]})); then builtin shopt -s "${__sg_on[@]}" || ((1)); fi
  if ((${#__sg_none[@]})); then builtin shopt -u "${__sg_none[@]}" || ((1)); fi
  __sg_inside=
}

# Whether the text parses between an opening and its closing word. Nothing of it is executed, whatever it holds: the
# first thing that runs is the return. Text that closes the bracket by itself passes one pair of words, never both.
__sg_parses() {
  builtin eval "\\builtin return 77 || $1
$__sg_text
$2"
}

# The last line of a command keeps $? and $_. It holds no word that an alias could stand for, and shows in no trace.
__sg_null=/dev/null
__sg_foot=$'\n((1)) >"$__sg_null" 2>"${__sg_null/%" ${__sg_was:=$?} ${__sg_were:=$_}"}"'

# Set __sg_code to what is evaluated for __sg_text.
__sg_prepare() {
  __sg_nonce=$1 __sg_noted= __sg_said= __sg_trapped=
  __sg_head='{ \__sg_leave; '
  # A trap for DEBUG or RETURN lives during commands only, so that it never sees what is typed.
  if [[ $__sg_traps == *' DEBUG'* || $__sg_traps == *' RETURN'* ]]; then __sg_head+='\builtin eval "$__sg_traps"; '; fi
  __sg_head+='\__sg_begin "$__sg_last" && \__sg_pass "$__sg_last"; } >/dev/null 2>&1'$'\n'
  __sg_leave # what follows is to be parsed as the text will be
  if { __sg_parses '{ \builtin :' '}' || [[ $? == 77 ]]; } && { __sg_parses 'if \builtin :; then \builtin :' 'fi' || [[ $? == 77 ]]; }; then
    __sg_code=$__sg_head$__sg_text$__sg_foot
  # Some text is valid by itself only: an unfinished here-document, patterns that it switches on itself, and whatever
  # follows an alias for one of these words.
  elif builtin eval '((1))' && ( builtin exec -c -a bash "$__sg_bash" --norc -p -O extglob -n <<<"$__sg_text" ) 2>|@DIR@/syntax; then
    __sg_code=$__sg_head$__sg_text
  else
    builtin printf '%s syntax 2\n' "$__sg_nonce" >@DIR@/status
    __sg_code=$__sg_head'\__sg_refuse'
  fi
  __sg_inside=1 POSIXLY_CORRECT=y
}

__sg_refuse() { builtin return 2; }

# The last thing before a command: $? and $_ are what the command before left.
__sg_begin() {
  builtin printf '\036%s{\036' "$__sg_nonce" >/dev/tty
  builtin unset -v __sg_text __sg_code
  __sg_was= __sg_were=
  if [[ $__sg_prompts ]]; then
    __sg_prompts=
    builtin shopt -s promptvars
  fi
  if [[ $__sg_flags == *v* ]]; then builtin set -v; fi
  if [[ $__sg_flags == *x* ]]; then builtin set -x; fi
  if [[ ! $__sg_off && ! $__sg_hidden ]]; then builtin return "$__sg_status"; fi
  # What was put away returns, in a group that is parsed without aliases. After it, no builtin is certain.
  __sg_again=
  if builtin shopt -q expand_aliases; then __sg_again='\builtin shopt -s expand_aliases; '; fi
  if [[ $__sg_off ]]; then __sg_again+="\\builtin enable -n ${__sg_off//$'\n'/ }"; fi
  builtin shopt -u expand_aliases
  builtin eval "{ __sg_off= __sg_hidden=; $__sg_again"$'\n'"$__sg_hidden"$'\n }' # no line of it begins with a brace: see shell_state.py
  case $__sg_status in
    0) ((1)) ;;
    1) ((0)) ;;
    *) ( POSIXLY_CORRECT=y; \exit "$__sg_status" ) ;;
  esac
}

# What was typed ahead and not read is dropped first, or it would run as a command.
__sg_end() {
  while builtin read -r -t 0 && builtin read -r -n 4096 -t 0.01 __sg_typed; do ((1)); done </dev/tty
  builtin printf '\036%s}\036' "$__sg_nonce" >/dev/tty
  builtin printf '%s end %s\n' "$__sg_nonce" "$__sg_status" >@DIR@/status
  __sg_said=1
}

# Set __sg_functions to the names of all functions that begin with a word.
__sg_list() {
  { builtin compgen -A function "$1"; builtin printf '\0'; } 1<>@DIR@"/state.$((1 - __sg_slot))"
  builtin mapfile -d '' -n 1 -t __sg_functions <@DIR@"/state.$((1 - __sg_slot))"
}

# The whole state in one file, a NUL after each section; the two files take turns, so that a complete one always exists.
# Files are written over (<>) and not emptied first (>|), which can take a file system a millisecond and more: what comes
# after the end is of earlier times.
__sg_dump() {
  if [[ $__sg_prompts ]]; then builtin shopt -s promptvars; fi
  __sg_dumped=$__sg_last
  if [[ $__sg_less ]]; then
    builtin : >|@DIR@/state.0 >|@DIR@/state.1 # the owner reads no file that is too long
    __sg_value=$*
    if ((${#__sg_value} > 250000)); then
      __sg_omitted+=$'@\n'
      builtin set -- # of this function
    fi
    if ((${#__sg_last} > 4096)); then __sg_dumped= __sg_omitted+=$'_\n'; fi
  fi
  # To print the functions of this file takes longer than all the rest, and they cannot be removed: are there others?
  __sg_list ''
  {
    builtin pwd; builtin printf '\0'
    if [[ $__sg_less ]]; then __sg_declare_small; else builtin declare -p; fi; builtin printf '\0'
    if ((${#__sg_functions} != __sg_own)); then builtin declare -f; fi; builtin printf '\0'
    if ((${#__sg_functions} != __sg_own)); then builtin declare -F; fi; builtin printf '\0'
    builtin alias -p; builtin printf '\0'
    builtin shopt -p; builtin printf '\0'
    builtin set +o; builtin printf '\0'
    builtin umask; builtin printf '\0'
    builtin ulimit -Sa; builtin printf '\0'
    builtin printf '%s\0' "$__sg_traps" "$__sg_flags" "$__sg_status" "$__sg_dumped"
    if (($#)); then builtin printf '%q ' "$@"; fi; builtin printf '\0'
    HISTTIMEFORMAT=$'\036' builtin history; builtin printf '\0'
    builtin printf '%s\n' "${DIRSTACK[@]//$'\n'/$'\036'}"; builtin printf '\0'
    builtin printf '%s\0' "$__sg_off" "$__sg_hidden" "$__sg_omitted" end
  } 1<>@DIR@"/state.$((1 - __sg_slot))"
  # Prompts are drawn between commands, where nobody waits for what they would execute.
  if [[ :$BASHOPTS: == *:promptvars:* ]]; then
    __sg_prompts=1
    builtin shopt -u promptvars
  fi
  __sg_slot=$((1 - __sg_slot))
  builtin printf '%s state %s\n' "$__sg_nonce" "$__sg_slot" >@DIR@/status
  __sg_nonce= __sg_less= __sg_omitted=
  # A prompt comes without the rest of the line after an interrupt.
  if [[ ${PROMPT_COMMAND-} != "$__sg_hook"* ]]; then PROMPT_COMMAND=$__sg_hook${PROMPT_COMMAND-}; fi
}

# After a command: what to evaluate next, in __sg_then.
__sg_resume() {
  __sg_then=(__sg_pass)
  if [[ ! $__sg_said ]]; then __sg_status=${__sg_was:-$1} __sg_last=$__sg_were; fi
  __sg_enter
  __sg_guard || ((1))
  if [[ $__sg_broken ]]; then return; fi
  \set +xv
  __sg_then=(eval "$__sg_late")
}

# `declare -p` of what is small, and of what is larger as long as all of that is not too much; the rest is named.
__sg_declare_small() {
  __sg_left=250000 __sg_names=()
  builtin mapfile -t __sg_all < <(builtin compgen -v)
  for __sg_name in "${__sg_all[@]}"; do
    if [[ $__sg_name == __sg_* || $__sg_name == *RANDOM ]]; then builtin continue; fi
    builtin eval "__sg_value=\${$__sg_name[*]-}\ \${!$__sg_name[*]}" || __sg_value=
    if ((${#__sg_value} <= 4096)); then
      __sg_names+=("$__sg_name")
    elif ((${#__sg_value} <= __sg_left)); then
      __sg_names+=("$__sg_name") __sg_left=$((__sg_left - ${#__sg_value}))
    else
      __sg_omitted+=$__sg_name$'\n'
    fi
  done
  __sg_value=
  builtin declare -p "${__sg_names[@]}"
}

# At a prompt: the same, if the command was left at once (`return`, an interrupt).
__sg_unfinished() {
  __sg_then=$?
  if [[ ! $__sg_nonce ]]; then
    __sg_then=(__sg_pass)
  else
    { __sg_resume "$__sg_then" || ((1)); } >/dev/null 2>&1
    __sg_then[1]+=' >/dev/null 2>&1'
  fi
}
__sg_hook='\__sg_unfinished;"${__sg_then[@]}";'

# Evaluated outside of functions, where traps and positional parameters are the user's. Complete after an interrupt too.
__sg_late='if [[ $__sg_nonce ]]; then
  __sg_leave || \builtin :
  if [[ ! $__sg_said ]]; then __sg_end || \builtin :; fi
  if [[ ! -t 0 ]]; then \builtin exec 0<>/dev/tty || \builtin :; fi # or the next command would never be read
  if [[ $__sg_kept ]]; then \builtin eval "$__sg_kept"; __sg_kept=; fi
  if [[ ! $__sg_trapped ]]; then
    { \builtin trap -p; \builtin printf "\0"; } 1<>@DIR@"/state.$((1 - __sg_slot))" || \builtin :
    \builtin mapfile -d "" -n 1 -t __sg_traps <@DIR@"/state.$((1 - __sg_slot))" ||
      IFS= \builtin read -r -d "" __sg_traps <@DIR@"/state.$((1 - __sg_slot))" || \builtin :
    __sg_trapped=1
  fi
  \builtin trap - DEBUG RETURN
  __sg_dump "$@" || \builtin :
fi'

# What remains of a command that ran too long must not run when its programs were killed. bash runs a trap before it goes
# on to the next command; this one, for a signal that nobody else uses, makes it take Ctrl-C even if that is trapped.
# At a prompt it does nothing: bash (5.2) that leaves a trap while it reads a line goes on to read beyond its buffer.
# There, this function is the only one that runs; within a command there is the file `go` too.
__sg_abort() {
  if [[ $__sg_nonce && ${#FUNCNAME[@]} != 1 ]]; then
    __sg_enter
    __sg_kept=$(\trap -p INT)${__sg_kept:+$'\n'$__sg_kept}
    \trap - INT
    \export -f builtin || \builtin kill -INT "$$"
  fi
} 2>/dev/null
builtin trap -- __sg_abort RTMAX

builtin readonly -f \
  __sg_{declare_small,list,pass,enter,guard,look,repair,leave,parses,prepare,refuse,begin,end,dump,resume,unfinished,abort}

__sg_list __sg_
__sg_own=$((${#__sg_functions} ? ${#__sg_functions} : -1)) # there are always others where they cannot be listed
