# a real udevd with the rule of contrib/udev gives volumes that are attached by `nbd` and `loop` their lasting names
# FORKDISK: the program; CHECK: scripts/udev-guest; the pools lie on ext4 on ubda
KIND=; mkdir -p /run/pools; export FORKDISK_COLOR=never FORKDISK_LOG=${FORKDISK_LOG:-warn}
# forkdisk itself cannot know where the lab keeps its modules
for m in ext4 fuse loop nbd; do modprobe $m || echo "FAILED modprobe $m"; done
mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 /dev/ubda && mount /dev/ubda /run/pools || echo "FAILED mkfs"
$CHECK $FORKDISK /run/pools ${MEANS:-nbd loop} 2>&1 || echo "FAILED with status $?"
echo "R $SCEN kernel=$(uname -r) udev=$(udevadm --version)"
