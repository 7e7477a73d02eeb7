package deviceplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	// checkpointFile is the file in which the kubelet keeps the devices that it allocated, in the directory of the plugins'
	// sockets (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/types.go). It replaces the file after each allocation.
	checkpointFile = "kubelet_internal_checkpoint"
	// maxCheckpoint bounds the number of bytes that are read. For a full node with the smallest unit the file has a few MiB.
	maxCheckpoint = 64 << 20
	// syncPause is the minimum time between two background reads, for which no call waits.
	syncPause = 100 * time.Millisecond
)

// checkpointJSON is the part of k8s.io/kubernetes pkg/kubelet/cm/devicemanager/checkpoint that is read here. The checksum covers
// the printed form of a Go value, so other programs can't compute it. It isn't needed: the file is replaced atomically.
type checkpointJSON struct {
	Data *struct {
		PodDeviceEntries []struct {
			PodUID        string
			ContainerName string
			ResourceName  corev1.ResourceName
			// DeviceIDs are grouped by NUMA node.
			DeviceIDs map[string][]string
			AllocResp []byte
		}
	}
}

// parseCheckpoint returns the entries for GPU memory.
func parseCheckpoint(data []byte) ([]allocation.Entry, error) {
	var file checkpointJSON
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	if file.Data == nil {
		return nil, errors.New("reading the kubelet's checkpoint: it has no Data")
	}
	var entries []allocation.Entry
	for _, e := range file.Data.PodDeviceEntries {
		if e.ResourceName != protocol.ResourceMemory || e.PodUID == "" || e.ContainerName == "" {
			continue
		}
		var ids []string
		for _, group := range e.DeviceIDs {
			ids = append(ids, group...)
		}
		entry := allocation.Entry{
			ContainerKey: allocation.ContainerKey{UID: gpu.PodUID(e.PodUID), Name: e.ContainerName},
			Allocation: allocation.Allocation{
				Card: allocation.UnknownCard, Request: gpu.Memory(len(ids)), Devices: allocation.NewDeviceSet(ids),
			},
		}
		var response pluginapi.ContainerAllocateResponse
		if err := proto.Unmarshal(e.AllocResp, &response); err == nil {
			for _, device := range response.CdiDevices {
				if limit, ok := isolation.LimitOf(device.GetName()); ok {
					entry.Limit = limit
				}
			}
			entry.MPS = response.Envs[isolation.EnvMPSPipeDirectory] != ""
			if assignment, err := protocol.ParseAssignment(response.Envs); err == nil && len(assignment.Cards) == 1 {
				entry.Card, entry.CardMemory = assignment.Cards[0].Index, assignment.Cards[0].Memory
			} else if response.Envs[protocol.AnnotationIndex] == strconv.Itoa(allocation.NoCard) {
				entry.Card = allocation.NoCard
			}
		}
		entries = append(entries, entry)
	}
	return entries, nil
}

// checkpoint keeps the record in line with the kubelet's checkpoint file.
type checkpoint struct {
	dir     string
	record  *allocation.Record
	pods    allocation.KnownPods
	changed func(gpu.PodUID)
	// stale receives a value when the file may have changed.
	stale chan struct{}

	// mu guards the fields below. Sync holds it throughout, so that an older checkpoint can't overwrite a newer one.
	mu      sync.Mutex
	last    fs.FileInfo
	entries []allocation.Entry
}

// Run updates the record until ctx ends. No allocation waits for it: with the smallest unit the file has several megabytes, and
// the kubelet writes it after each allocation while the next one waits.
func (c *checkpoint) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.stale:
		}
		c.Sync(ctx)
		// A burst of pods is handled as one change.
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(syncPause):
		}
	}
}

// Sync updates the record. If the file can't be read, its last known content is used.
func (c *checkpoint) Sync(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.read(); err != nil {
		klog.FromContext(ctx).Error(err, "Could not read the kubelet's checkpoint, using its last known content")
	}
	var written time.Time // Zero if there is no file.
	if c.last != nil {
		written = c.last.ModTime()
	}
	for _, uid := range c.record.Sync(c.entries, written, c.pods) {
		c.changed(uid)
	}
}

// read reads the file if it was replaced since. Without a file there are no entries; with an error the last ones stay.
func (c *checkpoint) read() error {
	file, err := os.Open(filepath.Join(c.dir, checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		c.last, c.entries = nil, nil
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening the kubelet's checkpoint: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("opening the kubelet's checkpoint: %w", err)
	}
	if sameFile(c.last, info) {
		return nil
	}
	data, err := io.ReadAll(io.LimitReader(file, maxCheckpoint))
	if err != nil {
		return fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	entries, err := parseCheckpoint(data)
	if err != nil {
		return err
	}
	c.last, c.entries = info, entries
	return nil
}

// sameFile reports whether both are one file in the same state. A new file can get the inode of a deleted one.
func sameFile(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
