"""What shells are told: scripts that ask `fleetctl __complete SHELL LINE` and show its answer.

The answer has one line for each candidate: what it is (plain, file, dir), its text and what it means, with tabs between.
"""

# Without bash-completion, and for bash 3.2, which is what macOS has: no `compopt` there, and no `complete -o nosort`.
# Who answers puts the blank behind what is whole.
BASH = r"""# fleetctl completion for bash. Add to ~/.bashrc: source <(fleetctl completion bash)
_fleetctl() {
    local kind value meaning word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    while IFS=$'\t' read -r kind value meaning; do
        case "$kind" in
            plain) COMPREPLY+=("$value") ;;
            whole) COMPREPLY+=("$value ") ;;
            file)
                compopt -o filenames +o nospace 2>/dev/null
                while IFS= read -r value; do COMPREPLY+=("$value"); done < <(compgen -f -- "$word")
                ;;
            dir)
                compopt -o filenames 2>/dev/null
                while IFS= read -r value; do COMPREPLY+=("$value"); done < <(compgen -d -- "$word")
                ;;
        esac
    done < <("$1" __complete bash "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null)
}
complete -o nospace -F _fleetctl fleetctl
"""

ZSH = r"""#compdef fleetctl
# fleetctl completion for zsh. Add to ~/.zshrc, after compinit: source <(fleetctl completion zsh)
_fleetctl() {
    local line kind value meaning
    local -a whole open
    for line in "${(@f)$("${words[1]}" __complete zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)}"; do
        kind="${line%%$'\t'*}"
        value="${${line#*$'\t'}%%$'\t'*}"
        meaning="${line##*$'\t'}"
        case "$kind" in
            plain) open+=("${value//:/\\:}${meaning:+:$meaning}") ;;
            whole) whole+=("${value//:/\\:}${meaning:+:$meaning}") ;;
            file) _files ;;
            dir) _files -/ ;;
        esac
    done
    (( $#whole )) && _describe -V fleetctl whole
    (( $#open )) && _describe -V fleetctl open -S ''
    return 0
}
if [[ "${zsh_eval_context[-1]}" == loadautofunc ]]; then
    _fleetctl "$@"
else
    compdef _fleetctl fleetctl
fi
"""

# fish itself leaves the blank out behind what ends with '/', '=', '.' or ','.
FISH = r"""# fleetctl completion for fish. Do: fleetctl completion fish > ~/.config/fish/completions/fleetctl.fish
function __fleetctl_complete
    set -l command (commandline -poc)[1]
    for line in ($command __complete fish (commandline -cp | string collect) 2>/dev/null)
        set -l parts (string split \t -- $line)
        switch $parts[1]
            case plain whole
                printf '%s\t%s\n' $parts[2] "$parts[3]"
            case file
                __fish_complete_path (commandline -ct)
            case dir
                __fish_complete_directories (commandline -ct)
        end
    end
end
complete -c fleetctl -f -a '(__fleetctl_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
