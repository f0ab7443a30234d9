# What the preflight asks the remote. root and scratch are set by the lines before this one; answers are
# name=value lines. scratch is a directory below root, made here for the trial transfer that follows;
# what earlier ones left that were killed is removed once it is an hour old: a check may run beside a run.
LC_ALL=C
export LC_ALL
printf "clock=%s\n" "$(date +%s)"
printf "system=%s\n" "$(uname -srm 2>/dev/null)"
printf "tar=%s\n" "$(tar --version 2>/dev/null | head -n 1)"
if [ ! -d "$root" ]; then
    printf "problem=%s: no such directory\n" "$root"
elif [ -e "$root/by-hash" ] && [ ! -w "$root/by-hash" ]; then
    printf "problem=%s/by-hash: Permission denied (as %s)\n" "$root" "$(id -un)"
elif ! message=$(mkdir "$scratch" 2>&1); then
    printf "problem=%s (as %s)\n" "$message" "$(id -un)"
fi
base=${scratch##*/}
find "$root" -maxdepth 1 -name "${base%.*}.*" -mmin +60 -exec rm -rf {} + 2>/dev/null
printf "free_kib=%s\n" "$(df -Pk "$root" 2>/dev/null | awk "NR == 2 { print \$4 }")"
