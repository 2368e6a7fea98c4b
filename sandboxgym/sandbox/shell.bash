# The inside of a persistent shell: definitions that shell.py sources once, with @DIR@ replaced by the shell's directory.
#
# A command arrives as the file `go`, which sets __sg_text, calls __sg_prepare and evaluates __sg_code. What is evaluated
# is: __sg_begin (prints the opening mark), the text, __sg_tail (prints the closing mark, sends the status, captures the
# state). Nothing here forks. What a user may have switched on (set -euxvC, traps, aliases, functions named like
# builtins, an odd IFS) must neither break these lines nor show them: hence `builtin`, `>|`, `|| :` and the muted groups.

builtin unset HISTFILE
builtin set +o history
builtin history -c # the line that sources this
# Without job control nothing is said about jobs, as in a script. Ctrl-C then reaches the shell too, which ends the command.
builtin set +o monitor

__sg_nonce= __sg_status=0 __sg_last= __sg_flags= __sg_traps= __sg_slot=0
__sg_bash=$BASH __sg_kept=

# Whether the text parses between an opening and its closing word. Nothing of it is executed, whatever it holds: the
# first thing that runs is the return. Text that closes the bracket by itself passes one pair of words, never both.
__sg_parses() {
  builtin eval "return 77 || $1
$__sg_text
$2"
} 2>/dev/null

# Set __sg_code to what is evaluated for __sg_text.
__sg_prepare() {
  __sg_nonce=$1
  local head='{ '
  # A trap for DEBUG or RETURN lives during commands only, so that it never sees what is typed.
  if [[ $__sg_traps == *' DEBUG'* || $__sg_traps == *' RETURN'* ]]; then head+='\builtin eval "$__sg_traps"; '; fi
  head+='__sg_begin "$__sg_last" && \builtin : "$__sg_last"; } >/dev/null 2>&1;'
  if { __sg_parses '{ :' '}' || [[ $? == 77 ]]; } && { __sg_parses 'if :; then :' 'fi' || [[ $? == 77 ]]; }; then
    __sg_code="$head $__sg_text"$'\n'"$__sg_tail"
  # Two kinds of text are valid by themselves only: an unfinished here-document, and patterns that it switches on itself.
  elif ( BASH_ENV= exec -a bash "$__sg_bash" --norc -O extglob -n <<<"$__sg_text" ) 2>|@DIR@/syntax; then
    __sg_code="$head"$'\n'"$__sg_text"
  else
    builtin printf '%s syntax 2\n' "$__sg_nonce" >@DIR@/status
    __sg_code="$head __sg_refuse && \builtin :"$'\n'"$__sg_tail"
  fi
}

__sg_refuse() { return 2; }

# The last thing before a command: $? and $_ are what the command before left.
__sg_begin() {
  builtin printf '\036%s{\036' "$__sg_nonce" >/dev/tty
  builtin unset -v __sg_text __sg_code
  if [[ $__sg_flags == *v* ]]; then builtin set -v; fi
  if [[ $__sg_flags == *x* ]]; then builtin set -x; fi
  return "$__sg_status"
}

# What was typed ahead and not read is dropped first, or it would run as a command.
__sg_end() {
  while builtin read -r -t 0 && builtin read -r -n 4096 -t 0.01 __sg_typed; do :; done </dev/tty
  builtin printf '\036%s}\036' "$__sg_nonce" >/dev/tty
  builtin printf '%s end %s\n' "$__sg_nonce" "$__sg_now" >@DIR@/status
  __sg_status=$__sg_now __sg_last=$__sg_arg __sg_flags=$-
  builtin set +xv
}

# The whole state in one file, a NUL after each section; the two files take turns, so that a complete one always exists.
# Files are written over (<>) and not emptied first (>|), which can take a file system a millisecond and more: what comes
# after the end is of earlier times.
__sg_dump() {
  __sg_slot=$((1 - __sg_slot))
  {
    builtin pwd; builtin printf '\0'
    builtin declare -p; builtin printf '\0'
    builtin declare -f; builtin printf '\0'
    builtin declare -F; builtin printf '\0'
    builtin alias -p; builtin printf '\0'
    builtin shopt -p; builtin printf '\0'
    builtin set +o; builtin printf '\0'
    builtin umask; builtin printf '\0'
    builtin ulimit -Sa; builtin printf '\0'
    builtin printf '%s\0' "$__sg_traps" "$__sg_flags" "$__sg_status" "$__sg_last"
    if (($#)); then builtin printf '%q ' "$@"; fi; builtin printf '\0'
    HISTTIMEFORMAT=$'\036' builtin history; builtin printf '\0'
    builtin dirs -l -p; builtin printf '\0end\0'
  } 1<>@DIR@/state.$__sg_slot
  builtin printf '%s state %s\n' "$__sg_nonce" "$__sg_slot" >@DIR@/status
  __sg_nonce=
  # A prompt comes without __sg_tail after an interrupt.
  [[ ${PROMPT_COMMAND-} == '\builtin eval "$__sg_tail";'* ]] ||
    PROMPT_COMMAND='\builtin eval "$__sg_tail";'${PROMPT_COMMAND-}
}

# What remains of a command that ran too long must not run when its programs were killed. bash runs a trap before it goes
# on to the next command; this one, for a signal that nobody else uses, makes it take Ctrl-C even if that is trapped.
# At a prompt it does nothing: bash (5.2) that leaves a trap while it reads a line goes on to read beyond its buffer.
# There, this function is the only one that runs; within a command there is the file `go` too.
__sg_abort() {
  [[ $__sg_nonce && ${#FUNCNAME[@]} != 1 ]] || return 0
  local kept
  kept=$(builtin trap -p INT)
  __sg_kept=${kept:-$__sg_kept}
  builtin trap - INT
  builtin kill -INT "$$"
}
builtin trap __sg_abort RTMAX

# Evaluated outside of functions, where traps and positional parameters are the user's.
__sg_late='if [[ ${__sg_nonce-} ]]; then
  __sg_end || \builtin :
  if [[ ${__sg_kept-} ]]; then \builtin eval "$__sg_kept"; __sg_kept=; fi
  { \builtin trap -p; \builtin printf "\0"; } 1<>@DIR@/state.$((1 - __sg_slot)) || \builtin :
  __sg_traps=; IFS= \builtin read -r -d "" __sg_traps <@DIR@/state.$((1 - __sg_slot)) || \builtin :
  \builtin trap - DEBUG RETURN
  __sg_dump "$@" || \builtin :
fi'
__sg_tail='{ __sg_now=$? __sg_arg=$_;\builtin eval "$__sg_late"; } >/dev/null 2>&1'
