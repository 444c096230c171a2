# `forkdisk attach` by the kernel's nbd driver: mkfs, mount, files, fstrim, a partition, a snapshot as a read-only
# device, detach FORKDISK: the program; MBS: MiB of the file system; the pool lies on ubda
KIND=; P=/dev/ubda M=/run/mnt F=$FORKDISK; mkdir -p $M; export FORKDISK_COLOR=never
modprobe ext4 && modprobe nbd || echo "FAILED modules" # forkdisk itself cannot know where the lab keeps its modules
# t WHAT COMMAND...: one step; says what failed, and that nothing else can be relied on
t() { what=$1; shift; echo "# $what"; "$@" > /run/out 2>&1 && return; echo "FAILED $what: $(tail -n 3 /run/out | tr '\n' ' ')"; halt -f; }
no() { what=$1; shift; echo "# $what is refused"; "$@" > /run/out 2>&1 || return; echo "FAILED $what: not refused"; halt -f; }
used() { $F stats $P --json | tr ',{}' '\n' | sed -n 's/^ *"used": *//p' | head -n 1; }
on() { t "attach $1" $F attach --by nbd $P/$1; D=$(cat /run/out); case $D in /dev/nbd*) ;; *) echo "FAILED attach: $D"; halt -f;; esac; }
t init $F init $P; t create $F create $P/a --size ${MBS:-256}M
on a; t mkfs mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 $D; t mount mount $D $M
dd if=/dev/urandom of=$M/kept bs=1M count=16 status=none; dd if=/dev/urandom of=$M/gone bs=1M count=64 status=none; sync
full=$(used); rm $M/gone; sync; t fstrim fstrim -v $M; sync; trimmed=$(used)
[ $((full-trimmed)) -ge $((60*1048576)) ] || { echo "FAILED fstrim: used $full before and $trimmed after"; halt -f; }
$F attach --list $P > /run/list; grep -q "^$D *nbd *$P/a$" /run/list || { echo "FAILED list: $(tr '\n' ' ' < /run/list)"; halt -f; }
no "detach of what is mounted" $F detach $D; no "stop of what is attached" $F stop $P; no "attach twice" $F attach --by nbd $P/a
PID=$($F attach --list $P > /dev/null; pidof -s ${F##*/}); FLAGS=$(sed 's/.*) //' /proc/$PID/stat | cut -d ' ' -f 7)
[ "$(cat /proc/$PID/oom_score_adj)" = -1000 ] || { echo "FAILED the daemon's out-of-memory score: $(cat /proc/$PID/oom_score_adj)"; halt -f; }
[ $((FLAGS & 0x180000)) = $((0x180000)) ] || { echo "FAILED the daemon waits for its devices: $FLAGS"; halt -f; }
sh -c 'echo -1000 > /proc/$$/oom_score_adj; "$0" with-parent $$ cat /proc/self/oom_score_adj; true' $F > /run/out 2>&1
[ "$(cat /run/out)" = 0 ] || { echo "FAILED the score of what a daemon starts: $(cat /run/out)"; halt -f; }
sum=$(sha256sum < $M/kept); t umount umount $M; t fsck e2fsck -f -n $D; t snapshot $F snapshot $P/a@x; t detach $F detach $D
no "a daemon without devices" $F stop $P; t check $F check $P
on a@x; [ "$(blockdev --getro $D)" = 1 ] || { echo "FAILED read-only"; halt -f; }
t "mount of the snapshot" mount -o ro $D $M; [ "$(sha256sum < $M/kept)" = "$sum" ] || { echo "FAILED the snapshot's file"; halt -f; }
t "umount of the snapshot" umount $M; t "detach of the snapshot" $F detach $P/a@x
t create $F create $P/live --size 64M; on live; t mkfs mkfs.ext4 -q $D; t mount mount $D $M; echo kept > $M/closed
t "snapshot of what is mounted" $F snapshot $P/live@x; echo late > $M/late
for verb in "delete -r $P/live" "rollback --force $P/live@x" "rename $P/live $P/other"; do
    no "$verb" $F $verb; grep -q "attached as $D: .forkdisk detach $D. first" /run/out || { echo "FAILED message: $(cat /run/out)"; halt -f; }
done
t grow $F resize $P/live --size 128M; [ "$(blockdev --getsize64 $D)" = 134217728 ] || { echo "FAILED growth: $(cat /run/out)"; halt -f; }
t resize2fs resize2fs $D; [ "$(df -k --output=size $M | tail -n 1)" -gt 100000 ] || { echo "FAILED size: $(df -k $M)"; halt -f; }
for round in 1 2 3 4 5; do
    dd if=/dev/urandom of=/run/data bs=64k count=64 status=none; before=$(pidof -s ${F##*/})
    (while [ ! -e /run/enough ]; do dd if=/run/data of=$M/written bs=64k oflag=direct,dsync conv=notrunc status=none || exit; done) & writer=$!
    sleep 0.5; t "upgrade $round" $F upgrade $P; sleep 0.5; touch /run/enough; wait $writer || { echo "FAILED writer over upgrade $round"; halt -f; }
    rm /run/enough; [ "$(pidof -s ${F##*/})" != "$before" ] || { echo "FAILED upgrade $round: the same process"; halt -f; }
    echo 3 > /proc/sys/vm/drop_caches; cmp /run/data $M/written || { echo "FAILED upgrade $round: read something else"; halt -f; }
done
$F attach --list $P > /run/list; grep -q "^$D *nbd *$P/live$" /run/list || { echo "FAILED list after upgrades: $(tr '\n' ' ' < /run/list)"; halt -f; }
t umount umount $M; t fsck e2fsck -f -n $D; t detach $F detach $D
on live@x; t "mount of a frozen snapshot" mount -o ro $D $M; [ "$(cat $M/closed)" = kept ] && [ ! -e $M/late ] || { echo "FAILED frozen snapshot"; halt -f; }
t umount umount $M; t detach $F detach $D
t create $F create $P/s0 $P/s1 --size 16M
for n in 0 1; do
    dd if=/dev/urandom of=/run/s$n bs=1M count=16 status=none; on s$n; t fill dd if=/run/s$n of=$D bs=1M oflag=direct,dsync status=none
    [ $n = 1 ] || t detach $F detach $D
done
for round in 1 2 3 4 5 6 7 8; do
    n=$((round % 2 ? 0 : 1)); dd if=$D of=/dev/null bs=1M status=none
    t "switch $round" $F switch $D --to $P/s$n; t "contents of s$n" cmp $D /run/s$n
done
t "switch back" $F switch $P/s1 --to $P/s0; t "contents of s0" cmp $D /run/s0
t mkfs mkfs.ext4 -q -F $D; t mount mount $D $M; no "switch of what is mounted" $F switch $D --to $P/s1
grep -q "mounted or in use" /run/out || { echo "FAILED message: $(cat /run/out)"; halt -f; }
t umount umount $M; t "switch back" $F switch $D --to $P/s1; t "contents of s1" cmp $D /run/s1; t detach $F detach $D
t create $F create $P/disk --size 64M; on disk
{ head -c 450 /dev/zero; printf '\203\0\0\0\0\010\0\0\0\300\001\0'; head -c 48 /dev/zero; printf '\125\252'; } | dd of=$D conv=fsync status=none
t "read the partitions" blockdev --rereadpt $D
t "mkfs on the partition" mkfs.ext4 -q ${D}p1; t "mount of the partition" mount ${D}p1 $M; no "detach with a partition in use" $F detach $D
t "umount of the partition" umount $M; t "detach of the disk" $F detach $P/disk; t check $F check $P
echo "R $SCEN used=$trimmed freed=$((full-trimmed)) rep=1 bytes=$full sec=1 MBps=1"
