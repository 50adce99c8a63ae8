"""``ptsave completion``: prints a completion script for bash, zsh or fish.

The script asks this module for completions.  click's own scripts need a set-up that a new user
account lacks, and lose names with commas, blanks or colons.  The scripts here send the line up to
the cursor, and quote the answers.  Each answer is a line: kind, value and description, separated by
tabs.
"""

from __future__ import annotations

import os
from typing import ClassVar

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    split_arg_string,
)

from ptsave.cli.commands import Command

LINE = "_PTSAVE_LINE"  # the environment variable that holds the typed line

_EXAMPLES = """
ptsave completion bash > ~/.ptsave.bash; echo '. ~/.ptsave.bash' >> ~/.bashrc
ptsave completion zsh > ~/.ptsave.zsh; echo '. ~/.ptsave.zsh' >> ~/.zshrc
mkdir -p ~/.config/fish/completions; ptsave completion fish > ~/.config/fish/completions/ptsave.fish
"""

# bash splits a word at colons, and replaces only the part after the last one.
_BASH = r"""_ptsave_completion() {
    local kind value rest line=${COMP_LINE:0:COMP_POINT}
    local word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    while IFS=$'\t' read -r kind value rest; do
        if [[ $kind == file ]]; then
            compopt -o default
            return
        fi
        if [[ $value == *:* && $COMP_WORDBREAKS == *:* ]]; then
            rest=${line##*[[:space:]]}
            [[ $rest == *:* ]] && value=${value#"${rest%:*}:"}
        fi
        [[ $word == [\"\']* ]] || printf -v value %q "$value"
        COMPREPLY+=("$value")
    done < <(_PTSAVE_LINE=$line _PTSAVE_COMPLETE=bash_complete ptsave 2>/dev/null)
}

complete -o nosort -F _ptsave_completion ptsave
"""
_ZSH = r"""#compdef ptsave
# A fresh account has not turned completion on.
[[ $zsh_eval_context[-1] == loadautofunc ]] || (( $+functions[compdef] )) || {
    autoload -Uz compinit && compinit -i
}

_ptsave_completion() {
    local kind value text line="${(j: :)words[1,CURRENT]}"
    local -a values shown
    while IFS=$'\t' read -r kind value text; do
        if [[ $kind == file ]]; then
            _files
            return
        fi
        values+=("$value")
        shown+=("$value${text:+  -- $text}")
    done < <(_PTSAVE_LINE=$line _PTSAVE_COMPLETE=zsh_complete ptsave 2>/dev/null)
    (( $#values )) && compadd -l -V unsorted -d shown -a values
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _ptsave_completion "$@"
else
    compdef _ptsave_completion ptsave
fi
"""
_FISH = r"""function _ptsave_completion
    set -lx _PTSAVE_LINE (commandline -cp | string collect)
    set -lx _PTSAVE_COMPLETE fish_complete
    for line in (ptsave 2>/dev/null)
        set -l parts (string split -m 2 \t -- $line)
        if test "$parts[1]" = file
            __fish_complete_path "$parts[2]"
        else
            printf '%s\t%s\n' "$parts[2]" "$parts[3]"
        end
    end
end

complete --no-files --command ptsave --arguments "(_ptsave_completion)"
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


class _Shell(ShellComplete):
    source_template: ClassVar[str] = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words after the command's name, and the word being typed."""
        # With one more character the last word is never empty, and never ends in a blank.
        words = split_arg_string(os.environ.get(LINE, "") + "x")
        return words[1:-1], words[-1][:-1]

    def format_completion(self, item: CompletionItem) -> str:
        line = f"{item.type}\t{item.value}\t{item.help or ''}"
        return line.encode(errors="replace").decode()  # surrogates cannot be completed


for _name in _SCRIPTS:
    add_completion_class(_Shell, _name)


@click.command("completion", cls=Command, examples=_EXAMPLES)
@click.argument("shell", type=click.Choice([*_SCRIPTS]))
def completion_command(shell: str) -> None:
    """Print a script that lets SHELL complete commands, options, files and entries.

    Save it in a file that the shell reads when it starts, as in the examples.
    """
    click.echo(_SCRIPTS[shell], nl=False)
