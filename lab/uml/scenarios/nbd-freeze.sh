# `forkdisk snapshot` of what is attached by the kernel's nbd driver and mounted: file systems on the device, on a
# partition of it, on device-mapper devices above both, and on LVM where it is installed. A writer runs meanwhile.
# Each snapshot has what was closed before, and mounts on a device that cannot be written, without a replay of its
# journal. FORKDISK: the program; CASES: some of the cases; the pool lies on ubda
KIND=; P=/dev/ubda M=/run/mnt F=$FORKDISK; mkdir -p $M; export FORKDISK_COLOR=never
# forkdisk itself cannot know where the lab keeps its modules
for m in ext4 xfs nbd dm-mod; do modprobe $m || echo "FAILED modprobe $m"; done
bad() { echo "FAILED $*"; halt -f; }
# t WHAT COMMAND...: one step; says what failed, and that nothing else can be relied on
t() {
  what=$1; shift; echo "# $what"
  "$@" > /run/out 2>&1 || bad "$what: $(tail -n 3 /run/out | tr '\n' ' ')"
}
on() { t "attach $1" $F attach --by nbd $P/$1; D=$(cat /run/out); [ -b "$D" ] || bad "attach: $D"; }
zeroes() { head -c $1 /dev/zero; }
# A table with one partition of 80 MiB from 1 MiB on
table() {
  { zeroes 450; printf '\203\0\0\0\0\010\0\0\0\200\002\0'; zeroes 48; printf '\125\252'; } > /run/table
  dd if=/run/table of=$1 conv=fsync status=none
  t "read the partitions" blockdev --rereadpt $1
}
# dm DEVICE [--readonly]: a linear device over all of it, named X
dm() {
  t "dmsetup create" dmsetup create X $2 --table "0 $(blockdev --getsz $1) linear $1 0"
  dmsetup mknodes; B=/dev/mapper/X; [ -b $B ] || bad "no $B"
}
# /etc is the host's: nothing is kept there
lv() {
  lvm "$@" --config 'activation { udev_sync=0 udev_rules=0 monitoring=0 } devices { use_devicesfile=0 }
                     backup { backup=0 archive=0 }'
}
new_lv() {
  t pvcreate lv pvcreate -q $D; t vgcreate lv vgcreate -q fdlab $D
  t lvcreate lv lvcreate -q -an -l 100%FREE -n v fdlab --zero n --wipesignatures n
}
# over HOW: sets B to what carries the file system, above the device D; with `new` set what lies between is made first
over() {
  case $1 in
    device) B=$D;;
    partition) [ -z "$new" ] || table $D; B=${D}p1; [ -b $B ] || bad "no $B";;
    dm) dm $D $ro;;
    dm-partition) [ -z "$new" ] || table $D; dm ${D}p1 $ro;;
    lvm) [ -z "$new" ] || new_lv
      t "vgchange -ay" lv vgchange -ay fdlab; lvm vgmknodes > /dev/null 2>&1
      B=/dev/fdlab/v; [ -b $B ] || bad "no $B";;
  esac
}
down() {
  case $1 in dm*) t "dmsetup remove" dmsetup remove X;; lvm) t "vgchange -an" lv vgchange -an fdlab;; esac
}
writer() {
  n=0
  while [ ! -e /run/enough ]; do
    n=$((n+1)); head -c 20000 /dev/urandom > $M/w.$n && echo $n > /run/written.new && mv /run/written.new /run/written
  done
}
written() { cat /run/written 2> /dev/null || echo 0; }
# wait_for N: until so many files are written
wait_for() {
  i=0
  while [ $(written) -lt $1 ]; do i=$((i+1)); [ $i -lt 600 ] || bad "the writer waits"; sleep 0.05; done
}
t init $F init $P
cases=${CASES:-ext4/device,ext4/partition,ext4/dm,ext4/dm-partition,ext4/lvm,xfs/device,xfs/dm}
for case in $(lst $cases); do
  fs=${case%/*} how=${case#*/} v=${case%/*}-${case#*/}; echo "# == $case"; rm -f /run/enough /run/written
  [ $how != lvm ] || [ -x /sbin/lvm ] || { echo "# LVM is not installed"; continue; }
  case $fs in ext4) size=96M;; xfs) size=320M;; esac # xfs has no smaller ones
  t create $F create $P/$v --size $size; on $v; new=1 ro=; over $how
  case $fs in
    ext4) t mkfs mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 $B;;
    xfs) t mkfs mkfs.xfs -q $B;;
  esac
  t mount mount $B $M; writer & W=$!; wait_for 20
  head -c 3000000 /dev/urandom > $M/closed; sum=$(sha256sum < $M/closed); before=$(written)
  t snapshot $F snapshot $P/$v@now; [ ! -s /run/out ] || bad "snapshot says: $(cat /run/out)"
  # The one that waited for the thaw, and more behind it
  after=$(written); wait_for $((after+5))
  echo late > $M/late; touch /run/enough; wait $W; t umount umount $M; down $how; t detach $F detach $D
  on $v@now; [ "$(blockdev --getro $D)" = 1 ] || bad "$D can be written"
  new= ro=--readonly; over $how; dmesg -c > /dev/null
  case $fs in
    ext4) dumpe2fs -h $B 2> /dev/null | grep features | grep -q needs_recovery && bad "the journal is not empty"
      t "mount of the snapshot" mount -o ro $B $M
      dmesg | grep -i -e recover -e replay > /run/replay && bad "replayed: $(cat /run/replay)";;
    # A frozen XFS leaves a record in its log (docs/attach.md)
    xfs) t "mount of the snapshot" mount -o ro,norecovery $B $M;;
  esac
  [ "$(sha256sum < $M/closed)" = "$sum" ] || bad "the file that was closed is not whole"
  [ ! -e $M/late ] || bad "the snapshot has what came after it"
  i=0
  while [ $i -lt $before ]; do
    i=$((i+1)); [ "$(stat -c %s $M/w.$i)" = 20000 ] || bad "file $i of $before is not whole"
  done
  t umount umount $M; down $how; t detach $F detach $D
  if [ $fs = xfs ]; then
    t clone $F clone $P/$v@now $P/$v-c; on $v-c; ro=; over $how; t "mount of a clone" mount -o nouuid $B $M
    t umount umount $M; t xfs_repair xfs_repair -n $B; down $how; t detach $F detach $D; t delete $F delete $P/$v-c
  fi
  t delete $F delete -r $P/$v
  echo "R $SCEN fs=$fs on=$how files=$before meanwhile=$((after-before)) rep=1 bytes=1 sec=1 MBps=1"
done
t check $F check $P
