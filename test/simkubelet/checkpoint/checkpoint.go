// Package checkpoint reads and writes kubelet_internal_checkpoint, the kubelet's file with the allocated devices of
// each container and the device plugin's answers.
//
// The kubelet computes the checksum over a printed form of the data that contains the names of its types
// (pkg/kubelet/checkpointmanager/checksum, k8s.io/utils/dump). So this package and its types must have the same names
// as those of pkg/kubelet/cm/devicemanager/checkpoint.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"

	"k8s.io/utils/dump"
)

// ErrCorrupt is the error for a wrong checksum.
var ErrCorrupt = errors.New("checkpoint is corrupted")

// DevicesPerNUMA holds device IDs by NUMA node; -1 is for devices without one.
type DevicesPerNUMA map[int64][]string

// PodDevicesEntry holds a container's devices of one resource. AllocResp is a marshalled ContainerAllocateResponse.
type PodDevicesEntry struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	DeviceIDs     DevicesPerNUMA
	AllocResp     []byte
}

type checkpointData struct {
	PodDeviceEntries  []PodDevicesEntry
	RegisteredDevices map[string][]string
}

type file struct {
	Data     checkpointData
	Checksum uint64
}

// Marshal returns the content of the file.
func Marshal(entries []PodDevicesEntry, registered map[string][]string) ([]byte, error) {
	data := checkpointData{PodDeviceEntries: entries, RegisteredDevices: registered}
	blob, err := json.Marshal(file{Data: data, Checksum: checksum(data)})
	if err != nil {
		return nil, fmt.Errorf("marshal checkpoint: %w", err)
	}
	return blob, nil
}

// Unmarshal parses the content of the file. The error is ErrCorrupt if the checksum is wrong.
func Unmarshal(blob []byte) (entries []PodDevicesEntry, registered map[string][]string, err error) {
	var f file
	if err := json.Unmarshal(blob, &f); err != nil {
		return nil, nil, fmt.Errorf("unmarshal checkpoint: %w", err)
	}
	if sum := checksum(f.Data); sum != f.Checksum {
		return nil, nil, fmt.Errorf("%w: checksum is %d, file has %d", ErrCorrupt, sum, f.Checksum)
	}
	return f.Data.PodDeviceEntries, f.Data.RegisteredDevices, nil
}

// Write replaces the file at path atomically.
func Write(path string, entries []PodDevicesEntry, registered map[string][]string) (err error) {
	blob, err := Marshal(entries, registered)
	if err != nil {
		return err
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".")
	if err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write checkpoint: %w", err), os.Remove(temp.Name()))
		}
	}()
	if _, err := temp.Write(blob); err != nil {
		return errors.Join(err, temp.Close())
	}
	// Unlike the kubelet, without fsync: this file need not survive a crash of the machine.
	if err := temp.Close(); err != nil {
		return err
	}
	return os.Rename(temp.Name(), path)
}

// Read reads the file at path.
func Read(path string) ([]PodDevicesEntry, map[string][]string, error) {
	blob, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("read checkpoint: %w", err)
	}
	return Unmarshal(blob)
}

func checksum(data checkpointData) uint64 {
	hash := fnv.New32a()
	_, _ = io.WriteString(hash, dump.ForHash(data)) // Writing to a hash returns no error.
	return uint64(hash.Sum32())
}
