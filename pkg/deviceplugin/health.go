package deviceplugin

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/file"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// healthFile keeps why cards are unhealthy until the node's inventory has it: the driver reports a Xid only once, and the plugin can end
// while the API server is unreachable. If the API server answers, the file exists for a moment only.
type healthFile struct {
	path, bootID string
	// mu guards the file and what follows.
	mu sync.Mutex
	// reasons is what was saved last, by UUID. version counts the changes.
	reasons map[string]string
	version int
}

// savedHealth is the content of the file.
type savedHealth struct {
	BootID string `json:"bootID"`
	// Reasons has each card with a UUID; the reason of a healthy card is empty.
	Reasons map[string]string `json:"reasons"`
}

// newHealthFile returns the file in the kubelet's device plugin directory. It is in a directory of its own, because the kubelet removes
// other files when it starts (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go).
func newHealthFile(directory, bootID string) *healthFile {
	return &healthFile{path: filepath.Join(directory, "gpushare", "health.json"), bootID: bootID}
}

// Save saves the reasons of the cards, if they have changed.
func (h *healthFile) Save(cards []gpu.Card) {
	reasons := map[string]string{}
	for _, card := range cards {
		if card.UUID != "" {
			reasons[card.UUID] = card.Unhealthy
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(reasons) == 0 || h.bootID == "" || maps.Equal(reasons, h.reasons) {
		return
	}
	h.reasons = reasons
	h.version++
	if err := h.write(); err != nil {
		klog.Background().Error(err, "Could not save the health of the cards: the plugin forgets a change if it ends before the Node has it")
	}
}

func (h *healthFile) write() error {
	data, err := json.Marshal(savedHealth{BootID: h.bootID, Reasons: h.reasons})
	if err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Dir(h.path), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return file.Replace(h.path, data)
}

// Version identifies what was saved last.
func (h *healthFile) Version() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.version
}

// Remove removes the file if it has this version: the Node has the reasons.
func (h *healthFile) Remove(version int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if version != h.version {
		return
	}
	if err := os.RemoveAll(filepath.Dir(h.path)); err != nil {
		klog.Background().Error(err, "Could not remove the file with the health of the cards")
	}
}

// Restore sets the reasons that an earlier run in this boot has saved, and that the node's inventory may lack.
func (h *healthFile) Restore(inventory *protocol.Inventory) {
	h.mu.Lock()
	defer h.mu.Unlock()
	data, err := os.ReadFile(h.path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var saved savedHealth
	if err := errors.Join(err, json.Unmarshal(data, &saved)); err != nil {
		klog.Background().Error(err, "Could not read the saved health of the cards")
		return
	}
	if saved.BootID != h.bootID {
		return
	}
	for i := range inventory.Cards {
		card := &inventory.Cards[i]
		if reason, ok := saved.Reasons[card.UUID]; ok {
			card.Unhealthy = reason
		} else if inventory.BootID != saved.BootID {
			card.Unhealthy = "" // The machine has restarted since.
		}
	}
	inventory.BootID = saved.BootID
}
