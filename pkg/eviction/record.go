package eviction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/queue"
)

// The record is a ConfigMap with the groups whose evictions have begun, so that a new leader can finish them. keyHolder names the term that
// wrote it last.
const keyGroups, keyHolder = "groups", "holder"

// errNotHeld means that this process can't begin evictions for others now: it has not read the record in this term yet, or another one holds it.
var errNotHeld = errors.New("this extender doesn't hold the record of evictions")

// decodeGroups returns the groups of the record's text. It leaves out what isn't a group.
func decodeGroups(text string) (groups []*group, err error) {
	if text == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &groups); err != nil {
		return nil, fmt.Errorf("reading the record of evictions: %w", err)
	}
	return slices.DeleteFunc(groups, func(g *group) bool { return g == nil || len(g.Pods) == 0 }), nil
}

// inherit reads the groups of the former leader, and begins to hold the record: the former leader, if it still runs, can't write it any more.
func (x *Executor) inherit(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			x.Observer.EvictionRecordFailed()
			err = fmt.Errorf("reading ConfigMap %s: %w", x.record, err)
		}
	}()
	object, err := x.readRecord(ctx)
	switch {
	case x.OnlyFinish && apierrors.IsForbidden(err): // As without the right to evict, which isn't needed then.
		object = &corev1.ConfigMap{}
	case err != nil:
		return err
	}
	groups, err := decodeGroups(object.Data[keyGroups])
	if err != nil {
		x.Observer.EvictionRecordFailed()
		klog.FromContext(ctx).Error(err, "Record of evictions can't be read, ignored: groups that a former leader evicted in part keep their other pods",
			"configMap", x.record)
	}
	now, holder := x.Clock.Now(), string(uuid.NewUUID())
	groups = slices.DeleteFunc(groups, func(g *group) bool { return now.Sub(g.Began) > outdatedAfter })
	if len(groups) > 0 || !x.OnlyFinish {
		if err := x.patchRecord(ctx, object, holder, groups); err != nil {
			return err
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.holder = holder
	for _, g := range groups {
		g.Message = fmt.Sprintf("Evicted after others for pod %s, of which a former leader of the extender began the evictions", g.For.pod())
		g.until = now.Add(queue.ArrivalTimeout)
		x.groups[g.id()] = g
	}
	return nil
}

// writeRecord writes the present groups, if this process leads and still has the term. That another process holds the record isn't counted as a failure.
func (x *Executor) writeRecord(ctx context.Context, holder string) error {
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error { // Evict and Tick can write at the same time.
		if err := x.Leading(); err != nil {
			return err
		}
		object, err := x.readRecord(ctx)
		if err != nil {
			return err
		}
		if other := object.Data[keyHolder]; other != holder && other != "" { // It has none if a user has deleted or emptied it.
			x.resign()
			return errNotHeld
		}
		x.mu.Lock()
		groups, held := x.sorted(), x.holder == holder
		x.unwritten = false
		x.mu.Unlock()
		if !held {
			return errNotHeld
		}
		return x.patchRecord(ctx, object, holder, groups)
	})
	if err == nil {
		return nil
	}
	x.mu.Lock()
	x.unwritten = true
	x.mu.Unlock()
	if x.Leading() == nil && !errors.Is(err, errNotHeld) {
		x.Observer.EvictionRecordFailed()
	}
	return fmt.Errorf("writing ConfigMap %s: %w", x.record, err)
}

// readRecord reads the record, or creates an empty one.
func (x *Executor) readRecord(ctx context.Context) (*corev1.ConfigMap, error) {
	object, err := x.API.ConfigMap(ctx, x.record.Namespace, x.record.Name)
	if apierrors.IsNotFound(err) {
		return x.API.CreateConfigMap(ctx, x.record.Namespace, x.record.Name)
	}
	return object, err
}

// patchRecord writes the groups and their holder to the record, if it has not changed since it was read.
func (x *Executor) patchRecord(ctx context.Context, read *corev1.ConfigMap, holder string, groups []*group) error {
	text, err := json.Marshal(groups)
	if err != nil {
		return err
	}
	data := map[string]string{keyGroups: string(text), keyHolder: holder}
	_, err = x.API.PatchConfigMap(ctx, x.record.Namespace, x.record.Name, read.ResourceVersion, data)
	return err
}
