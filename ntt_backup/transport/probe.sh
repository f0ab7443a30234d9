# What the preflight asks the remote. root is set by the line before this one; answers are name=value lines.
LC_ALL=C
export LC_ALL
printf "clock=%s\n" "$(date +%s)"
printf "system=%s\n" "$(uname -srm 2>/dev/null)"
printf "tar=%s\n" "$(tar --version 2>/dev/null | head -n 1)"
if [ ! -d "$root" ]; then
    printf "problem=%s: no such directory\n" "$root"
elif [ ! -w "$root" ] || [ ! -x "$root" ]; then
    printf "problem=%s: the account %s may not write there, or it is mounted read-only\n" "$root" "$(id -un)"
fi
printf "free_kib=%s\n" "$(df -Pk "$root" 2>/dev/null | awk "NR == 2 { print \$4 }")"
