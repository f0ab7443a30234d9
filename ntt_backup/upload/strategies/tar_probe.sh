# What the preflight asks the remote. The lines before this one set root, stem and scratch; answers are
# name=value lines. scratch is a directory below root, made here for the trial transfer that follows, or
# nothing. It goes when our stdin ends, however that comes: whoever asked may be killed. What is left all the
# same, where this machine went down (names that begin with stem), is removed once it is an hour old: a check
# may run beside a run.
LC_ALL=C
export LC_ALL
trap : PIPE
mount_point() { df -P "$1" | sed -n "2s/^.*% *//p"; }
printf "clock=%s\n" "$(date +%s)"
printf "system=%s\n" "$(uname -srm 2>/dev/null)"
printf "tar=%s\n" "$(tar --version 2>/dev/null | head -n 1)"
! command -v python3 >/dev/null || echo python=present
if [ ! -d "$root" ]; then
    printf "problem=%s: no such directory\n" "$root"
elif [ -e "$root/by-hash" ] && [ ! -w "$root/by-hash" ]; then
    printf "problem=%s/by-hash: Permission denied (as %s)\n" "$root" "$(id -un)"
elif [ -d "$root/by-hash" ] && [ "$(mount_point "$root")" != "$(mount_point "$root/by-hash")" ]; then
    printf "problem=%s/by-hash: is on another file system than %s\n" "$root" "$root"
elif [ -e "$root/.ntt-incoming" ] && ! { [ -d "$root/.ntt-incoming" ] && [ -w "$root/.ntt-incoming" ]; }; then
    printf "problem=%s/.ntt-incoming: Permission denied, or no directory (as %s)\n" "$root" "$(id -un)"
elif [ -n "$scratch" ] && ! message=$(mkdir "$scratch" "$scratch/by-hash" 2>&1); then
    printf "problem=%s (as %s)\n" "$message" "$(id -un)"
elif [ ! -w "$root" ]; then
    printf "problem=%s: Permission denied (as %s)\n" "$root" "$(id -un)"
fi
[ ! -d "$root/by-hash" ] || echo by-hash=present
[ -n "$(ls -A "$root/by-hash" 2>/dev/null | head -n 1)" ] || echo empty=yes
for marker in "$root/format.json" "$root/.ntt-target.json"; do
    [ ! -e "$marker" ] || { printf "marker=%s\n" "$(head -c 4000 "$marker" 2>&1 | tr -d "\n\r")" && break; }
done
find "$root/" -maxdepth 1 -name "$stem.*" -mmin +60 -exec rm -rf {} + 2>/dev/null
printf "free_kib=%s\n" "$(df -Pk "$root" 2>/dev/null | awk "NR == 2 { print \$4 }")"
# Some file systems have no fixed number of inodes, some a df of other columns.
printf "free_inodes=%s\n" "$(df -Pi "$root" 2>/dev/null |
    awk "NR == 1 { known = (\$2 == \"Inodes\") } NR == 2 && known && \$2 > 0 { print \$4 }")"
[ -n "$scratch" ] || exit 0
echo kept=yes
cat >/dev/null
cd /
# A session that was ended with us may still be at work in it.
tries=30
while ! rm -rf "$scratch" 2>/dev/null && [ $tries -gt 0 ]; do sleep 1; tries=$((tries - 1)); done
[ ! -e "$scratch" ]
