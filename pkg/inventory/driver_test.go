package inventory

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// stubDevice is a card that supports events and answers a registration with an error or with SUCCESS.
type stubDevice struct {
	nvml.Device
	registration nvml.Return
}

func (d *stubDevice) GetSupportedEventTypes() (uint64, nvml.Return) {
	return nvml.EventTypeXidCriticalError, nvml.SUCCESS
}
func (d *stubDevice) RegisterEvents(uint64, nvml.EventSet) nvml.Return { return d.registration }

// Only cards that were registered are watched.
func TestRegister(t *testing.T) {
	good, unsupported := &stubDevice{registration: nvml.SUCCESS}, &stubDevice{registration: nvml.ERROR_NOT_SUPPORTED}
	devices := []device{{handle: good, uuid: "good"}, {handle: unsupported, uuid: "unsupported"}}
	got, failed := register(nil, devices)
	if diff := cmp.Diff(map[nvml.Device]string{good: "good"}, got); diff != "" || failed || devices[1].err != nil {
		t.Errorf("failed %t, error %v; (-want +got)\n%s", failed, devices[1].err, diff)
	}
}
