package fake

import (
	"context"
	"errors"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// EvictionAPI is eviction.API.
type EvictionAPI interface {
	Evict(ctx context.Context, pod gpu.Pod, grace *int64, dryRun bool) error
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error)
	CreateConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error)
	PatchConfigMap(ctx context.Context, namespace, name, version string, data map[string]string) (*corev1.ConfigMap, error)
	PodsOn(ctx context.Context, node string) ([]corev1.Pod, error)
	Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error)
}

// Mortal is the API of a process that dies at a call: before the API server has made it, or after that, so that the answer is lost.
type Mortal struct {
	EvictionAPI
	// Left is the number of the call at which the process dies. After is true if the API server makes it.
	Left  int
	After bool
	// Evicted, if it is set, gets the names of the pods of which the API server has granted the eviction.
	Evicted *[]string

	mu sync.Mutex // It is held during a call.
}

// ErrDead is the error of all calls of a process that is dead.
var ErrDead = errors.New("the process is dead")

func call[T any](m *Mortal, make func() (T, error)) (T, error) {
	var none T
	m.mu.Lock()
	defer m.mu.Unlock()
	switch m.Left--; {
	case m.Left > 0:
		return make()
	case m.Left == 0 && m.After:
		_, _ = make()
	}
	return none, ErrDead
}

// Evict implements EvictionAPI.
func (m *Mortal) Evict(ctx context.Context, pod gpu.Pod, grace *int64, dryRun bool) error {
	_, err := call(m, func() (bool, error) {
		err := m.EvictionAPI.Evict(ctx, pod, grace, dryRun)
		if err == nil && !dryRun && m.Evicted != nil {
			*m.Evicted = append(*m.Evicted, pod.Name)
		}
		return true, err
	})
	return err
}

// Pod implements EvictionAPI.
func (m *Mortal) Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	return call(m, func() (*corev1.Pod, error) { return m.EvictionAPI.Pod(ctx, namespace, name) })
}

// ConfigMap implements EvictionAPI.
func (m *Mortal) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	return call(m, func() (*corev1.ConfigMap, error) { return m.EvictionAPI.ConfigMap(ctx, namespace, name) })
}

// CreateConfigMap implements EvictionAPI.
func (m *Mortal) CreateConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	return call(m, func() (*corev1.ConfigMap, error) { return m.EvictionAPI.CreateConfigMap(ctx, namespace, name) })
}

// PatchConfigMap implements EvictionAPI.
func (m *Mortal) PatchConfigMap(ctx context.Context, namespace, name, version string, data map[string]string) (*corev1.ConfigMap, error) {
	return call(m, func() (*corev1.ConfigMap, error) {
		return m.EvictionAPI.PatchConfigMap(ctx, namespace, name, version, data)
	})
}
