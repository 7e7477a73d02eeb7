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
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/file"
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
	// syncInterval is the time between two background reads, for which no call waits.
	syncInterval = time.Second
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

// deviceEntry is a container's entry for GPU memory.
type deviceEntry struct {
	allocation.ContainerKey
	ids      []string
	response []byte
}

// parseDevices returns the entries for GPU memory.
func parseDevices(data []byte) ([]deviceEntry, error) {
	var file checkpointJSON
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	if file.Data == nil {
		return nil, errors.New("reading the kubelet's checkpoint: it has no Data")
	}
	var entries []deviceEntry
	for _, e := range file.Data.PodDeviceEntries {
		if e.ResourceName != protocol.ResourceMemory || e.PodUID == "" || e.ContainerName == "" {
			continue
		}
		entry := deviceEntry{ContainerKey: allocation.ContainerKey{UID: gpu.PodUID(e.PodUID), Name: e.ContainerName}, response: e.AllocResp}
		for _, group := range e.DeviceIDs {
			entry.ids = append(entry.ids, group...)
		}
		entries = append(entries, entry)
	}
	return entries, nil
}

// parseCheckpoint returns what containers were given.
func parseCheckpoint(data []byte, backends *isolation.Backends) ([]allocation.Entry, error) {
	devices, err := parseDevices(data)
	if err != nil {
		return nil, err
	}
	var entries []allocation.Entry
	for _, e := range devices {
		entry := allocation.Entry{ContainerKey: e.ContainerKey}
		var response pluginapi.ContainerAllocateResponse
		if err := proto.Unmarshal(e.response, &response); err != nil {
			entry.Unknown = true
		} else {
			entry.Allocation = allocationOf(&response, gpu.Memory(len(e.ids)), backends)
		}
		entry.Devices = allocation.NewDeviceSet(e.ids)
		entries = append(entries, entry)
	}
	return entries, nil
}

// allocationOf returns what a container with this request was given, as the plugin's response shows it.
func allocationOf(response *pluginapi.ContainerAllocateResponse, request gpu.Memory, backends *isolation.Backends) allocation.Allocation {
	assignment, err := protocol.ParseAssignment(response.Envs)
	if err != nil {
		return allocation.Allocation{Unknown: response.Envs[protocol.AnnotationIndex] != strconv.Itoa(allocation.NoCard)}
	}
	var cards []gpu.Card
	for _, card := range assignment.Sorted() {
		cards = append(cards, gpu.Card{Index: card.Index, Memory: card.Memory})
	}
	cores := min(protocol.CoresOf(response.Envs), gpu.CardCores) * gpu.Cores(len(cards))
	given := allocation.Give(allocation.Container{Request: request, Cores: cores}, cards)
	for name := range strings.SplitSeq(response.Envs[protocol.EnvVisibleDevices], ",") {
		if _, err := strconv.Atoi(name); err != nil && name != "" {
			given.UUIDs = append(given.UUIDs, name)
		}
	}
	given.Allowed = protocol.AllowedOf(response.Envs)
	given.Adapters.Ports = response.Envs[protocol.EnvRDMAPorts]
	for _, device := range response.Devices {
		if name, ok := strings.CutPrefix(device.GetHostPath(), rdmaDevices); ok && name != connectionManager {
			given.Adapters.Devices = append(given.Adapters.Devices, name)
		}
	}
	edits := isolation.Edits{Env: response.Envs}
	for _, device := range response.CdiDevices {
		edits.Devices = append(edits.Devices, device.GetName())
	}
	mode, limit := backends.ModeOf(edits)
	given.Mode, given.Limit = string(mode), limit
	return given
}

// checkpoint keeps the record in line with the kubelet's checkpoint file.
type checkpoint struct {
	dir    string
	record *allocation.Record
	pods   allocation.KnownPods
	// annotate is called for each pod whose annotations may have to change.
	annotate func(gpu.PodUID)
	// backends tell which containers they limit.
	backends *isolation.Backends

	// mu guards the fields below. Sync holds it throughout, so that an older checkpoint can't overwrite a newer one.
	mu      sync.Mutex
	last    fs.FileInfo
	entries []allocation.Entry
	// problem is why the last attempt to read the file failed; empty if it didn't.
	problem string
}

// Run updates the record until ctx ends. No allocation waits for it: with the smallest unit the file has several megabytes, and
// the kubelet writes it after each allocation while the next one waits.
func (c *checkpoint) Run(ctx context.Context) error {
	return background.Every(ctx, clock.RealClock{}, syncInterval, c.Sync)
}

// Sync updates the record. If the file can't be read, its last known content is used.
func (c *checkpoint) Sync(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.problem
	c.problem = ""
	if err := c.read(); err != nil {
		c.problem = err.Error()
		if c.problem != before { // A file that can't be parsed stays until the kubelet replaces it.
			klog.FromContext(ctx).Error(err, "Could not read the kubelet's checkpoint, using its last known content")
		}
	}
	var written time.Time // Zero if there is no file.
	if c.last != nil {
		written = c.last.ModTime()
	}
	for _, uid := range c.record.Sync(c.entries, written, c.pods) {
		c.annotate(uid)
	}
}

// read reads the file if it was replaced since. Without a file there are no entries; with an error the last ones stay.
func (c *checkpoint) read() error {
	opened, err := os.Open(filepath.Join(c.dir, checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		c.last, c.entries = nil, nil
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening the kubelet's checkpoint: %w", err)
	}
	defer opened.Close()
	info, err := opened.Stat()
	if err != nil {
		return fmt.Errorf("opening the kubelet's checkpoint: %w", err)
	}
	if file.Same(c.last, info) {
		return nil
	}
	data, err := io.ReadAll(io.LimitReader(opened, maxCheckpoint))
	if err != nil {
		return fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	entries, err := parseCheckpoint(data, c.backends)
	if err != nil {
		return err
	}
	c.last, c.entries = info, entries
	return nil
}

// Devices returns the pod of each device in the file. It isn't kept: a pod can have many thousands of devices.
func (c *checkpoint) Devices() (map[string]gpu.PodUID, error) {
	data, err := os.ReadFile(filepath.Join(c.dir, checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the kubelet's checkpoint: %w", err)
	}
	entries, err := parseDevices(data)
	if err != nil {
		return nil, err
	}
	pods := map[string]gpu.PodUID{}
	for _, e := range entries {
		for _, id := range e.ids {
			pods[id] = e.UID
		}
	}
	return pods, nil
}
