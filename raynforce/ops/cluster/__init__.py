"""`raynforce cluster`: write the files of a cluster, check such files, and ask a cluster how it is."""

from raynforce.ops.cluster.checking import check as check
from raynforce.ops.cluster.findings import Finding as Finding
from raynforce.ops.cluster.options import TARGETS as TARGETS
from raynforce.ops.cluster.options import Options as Options
from raynforce.ops.cluster.status import status as status
from raynforce.ops.cluster.writing import init as init
