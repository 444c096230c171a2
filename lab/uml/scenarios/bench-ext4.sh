# W1 for `forkdisk bench w1`: ext4 with and without a snapshot below it; PEER=forkdisk: on a volume of a pool, or on an
# origin that a pool protects; PEER=dm-snapshot: an origin; CHUNKS in sectors SIZES=10,100 (MiB) FSMB=size of the file
# system
AFTER=sync; MB=1048576; S=$((FSMB*2048)); M=/run/mnt; mkdir -p $M; modprobe ext4
case $PEER in
forkdisk) F=$V; snap_on() { act 2; }; snap_off() { act 3; };;
dm-snapshot) F=/dev/mapper/origin
 dmsetup create real --table "0 $S linear $D0 0"; dmsetup create origin --table "0 $S linear /dev/mapper/real 0"
 snap_on() { dd if=/dev/zero of=$D1 bs=1M count=1 conv=fsync status=none; dmsetup suspend --nolockfs origin; dmsetup create snap --table "0 $S snapshot /dev/mapper/real $D1 P $1"; dmsetup load origin --table "0 $S snapshot-origin /dev/mapper/real"; dmsetup resume origin; }
 snap_off() { dmsetup status snap | grep -q Invalid && echo "FAILED the snapshot became invalid"; dmsetup suspend --nolockfs origin; dmsetup load origin --table "0 $S linear /dev/mapper/real 0"; dmsetup resume origin; dmsetup remove snap; };;
esac
mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard $F && mount -t ext4 -o noatime $F $M || { echo "FAILED mkfs or mount of $F"; halt -f; }
REP=1
# cell SIZE OP SYNC BLOCK COUNT CHUNK
cell() {
 rm -f $M/f; sync; [ $2 = update ] && dd if=/dev/zero of=$M/f bs=1M count=$1 conv=fsync status=none
 drop; [ $6 = 0 ] || snap_on $6
 c=; [ $2 = update ] && c=conv=notrunc; [ $3 = dd-fsync ] && c=conv=fsync && [ $2 = update ] && c=conv=notrunc,fsync
 m "chunk=$(($6/2)) op=$2 how=$3 block=$4 size=$1" $(($1*MB)) dd if=/dev/zero of=$M/f bs=$4 count=$5 $c
 [ $6 = 0 ] || snap_off
}
for sz in $(lst $SIZES); do for op in create update; do for how in dd dd-fsync; do for ch in 0 $(lst $CHUNKS); do
 cell $sz $op $how 4096 $((sz*256)) $ch
done; done; done
 for ch in 0 $(lst $CHUNKS); do cell $sz update dd $MB $sz $ch; done
done
umount $M
