package simkubelet

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// noNUMA is the NUMA node of devices without one.
const noNUMA = -1

// Checkpoint is kubelet_internal_checkpoint, the kubelet's file with the allocated devices of each container and the
// device plugins' answers (cm/devicemanager/checkpoint). The kubelet adds a checksum over the printed form of its own
// types; it is omitted here, because no device plugin can check it.
type Checkpoint struct {
	PodDeviceEntries []CheckpointEntry
	// RegisteredDevices are the device IDs by resource.
	RegisteredDevices map[string][]string
}

// CheckpointEntry holds a container's devices of one resource.
type CheckpointEntry struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	// DeviceIDs are grouped by NUMA node.
	DeviceIDs map[int64][]string
	// AllocResp is a marshalled ContainerAllocateResponse.
	AllocResp []byte
}

// Response returns the device plugin's answer.
func (e *CheckpointEntry) Response() (*pluginapi.ContainerAllocateResponse, error) {
	response := &pluginapi.ContainerAllocateResponse{}
	if err := proto.Unmarshal(e.AllocResp, response); err != nil {
		return nil, fmt.Errorf("unmarshal the answer for container %s of pod %s: %w", e.ContainerName, e.PodUID, err)
	}
	return response, nil
}

// devices returns the device IDs of all NUMA nodes.
func (e *CheckpointEntry) devices() (ids []string) {
	for _, group := range e.DeviceIDs {
		ids = append(ids, group...)
	}
	return slices.Clip(ids)
}

type checkpointFile struct{ Data Checkpoint }

// ReadCheckpoint reads the file of a simulated or a real kubelet.
func ReadCheckpoint(path string) (Checkpoint, error) {
	var file checkpointFile
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &file)
	}
	if err != nil {
		return Checkpoint{}, fmt.Errorf("reading the checkpoint: %w", err)
	}
	return file.Data, nil
}

// write replaces the file at path atomically. Unlike the kubelet it doesn't sync the file: it need not survive a crash of
// the machine.
func (c Checkpoint) write(path string) error {
	data, err := json.Marshal(checkpointFile{c})
	if err != nil {
		return fmt.Errorf("writing the checkpoint: %w", err)
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return fmt.Errorf("writing the checkpoint: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("writing the checkpoint: %w", err)
	}
	return nil
}
