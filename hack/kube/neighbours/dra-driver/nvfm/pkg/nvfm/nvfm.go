// Package nvfm takes the place of NVIDIA's bindings of the Fabric Manager's library, which the DRA driver imports. Its functions fail as
// on a machine without that library. The driver calls them only with its feature gate FabricManagerPartitioning, which is off by default.
package nvfm

import "strconv"

// Return is the result of a call.
type Return int

// The results of these functions.
const (
	SUCCESS       Return = 0
	NOT_SUPPORTED Return = -8
)

func (r Return) String() string { return "Fabric Manager: result " + strconv.Itoa(int(r)) }

type (
	// FabricPartitionId names a partition.
	FabricPartitionId uint32
	// LibraryOption and ConnectOption have no effect.
	LibraryOption struct{}
	ConnectOption struct{}
)

// FabricPartitionList has the fields that the driver reads. It is always empty.
type FabricPartitionList struct {
	NumPartitions uint32
	PartitionInfo [1]struct {
		PartitionId, IsActive, NumGpus uint32
		GpuInfo                        [1]struct {
			PhysicalId                                             uint32
			Uuid, PciBusId                                         [1]int8
			NumNvLinksAvailable, MaxNumNvLinks, NvlinkLineRateMBps uint32
		}
	}
}

// Interface is the library.
type Interface interface {
	Init() Return
	Shutdown() Return
	Connect(...ConnectOption) (Handle, Return)
}

// Handle is a connection.
type Handle interface {
	Disconnect() Return
	GetSupportedFabricPartitions() (FabricPartitionList, Return)
	ActivateFabricPartition(FabricPartitionId) Return
	DeactivateFabricPartition(FabricPartitionId) Return
}

type missing struct{}

func (missing) Init() Return                              { return NOT_SUPPORTED }
func (missing) Shutdown() Return                          { return NOT_SUPPORTED }
func (missing) Connect(...ConnectOption) (Handle, Return) { return nil, NOT_SUPPORTED }

func New(...LibraryOption) Interface { return missing{} }

func WithLibraryPath(string) (o LibraryOption) { return }
func WithUnixSocket(string) (o ConnectOption)  { return }
func WithAddress(string) (o ConnectOption)     { return }
func WithTimeoutMs(uint32) (o ConnectOption)   { return }
