# end-to-end tests (those of all doors, for example), with the clients of the host, on this kernel
# E2E: the program of the tests; DOORS: a file with names of tests or parts of them, one a line; their files lie on ext4
# on ubda FORKDISK_TEST_ATTACH_BY=nbd: what tests attach is to be a device of the nbd driver
KIND=; export TMPDIR=/run/t HOME=/run XDG_RUNTIME_DIR=/run FORKDISK_COLOR=never FORKDISK_TEST_REQUIRE_CLIENTS
for m in ext4 fuse loop nbd; do modprobe $m || echo "FAILED modprobe $m"; done # forkdisk itself cannot know where the lab keeps its modules
ip link set lo up || echo "FAILED ip"
mkdir -p $TMPDIR; mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 /dev/ubda && mount /dev/ubda $TMPDIR || echo "FAILED mkfs"
chmod 1777 $TMPDIR; cd $TMPDIR; uname -sr
$E2E --color never --test-threads=${THREADS:-2} $(grep -v '^#' $DOORS) 2>&1 || echo "FAILED with status $?"
echo "R $SCEN kernel=$(uname -r)"
