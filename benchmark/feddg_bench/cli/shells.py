"""Scripts for completion in shells.

Typer's protocol for fish, lines of values, also serves bash and zsh here: these scripts complete
values after ``KEY=``, too, and put no space behind a key.
"""

from __future__ import annotations

from contextlib import suppress

_CALL = (
    'env _TYPER_COMPLETE_ARGS="{line}" _TYPER_COMPLETE_FISH_ACTION=get-args '
    "%(autocomplete_var)s=complete_fish {program} 2>/dev/null"
)
_BASH = """
%(complete_func)s() {
    local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT} given="" found
    COMPREPLY=()
    if [[ ${line##* } == *=* && $COMP_WORDBREAKS == *=* ]]; then
        given=${line##* } given=${given%%=*}=
    fi
    for found in $(CALL); do
        found=${found%%%%$'\\t'*}
        COMPREPLY+=("${found#"$given"}")
    done
    [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace
}

complete -o default -o nosort -F %(complete_func)s %(prog_name)s
""".replace("CALL", _CALL.format(line="$line", program="$1"))
_ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
    local -a found=("${(@f)$(CALL)}")
    found=("${(@)found%%%%$'\\t'*}")
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
    [[ -n $found ]] || _files
}

compdef %(complete_func)s %(prog_name)s
""".replace("CALL", _CALL.format(line="${words[1,$CURRENT]}", program="%(prog_name)s"))


def own_scripts() -> None:
    """Let ``--install-completion`` and ``--show-completion`` write the scripts above.

    A Typer that keeps its scripts elsewhere writes its own, which complete all but values.
    """
    with suppress(ImportError, AttributeError):
        from typer import _completion_shared

        _completion_shared._completion_scripts |= {"bash": _BASH, "zsh": _ZSH}
