package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/cmd/internal/program"
	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/tokenauth"
	"github.com/gpushare/gpushare/pkg/version"
)

const component = "gpushare-device-plugin"

// printInventory prints the inventory annotation that a plugin would write. The API server is not asked, so of several configurations the
// default is used.
func printInventory(ctx context.Context, out io.Writer, o options) error {
	selected, err := o.plugin.Config.Read("")
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	o.monitor.Settings = selected.Settings.Settings
	state, err := inventory.List(ctx, o.monitor)
	if err != nil {
		return fmt.Errorf("listing the cards: %w", err)
	}
	if len(state.Cards) == 0 && state.Problem != "" {
		return fmt.Errorf("listing the cards: %s", state.Problem)
	}
	session, err := inventory.OpenSession(o.monitor.Library)
	if err != nil {
		return fmt.Errorf("listing the cards: %w", err)
	}
	defer session.Close()
	o.plugin.BootID = inventory.BootID()
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(deviceplugin.Inventory(o.plugin, selected.Settings, state.Cards, state.Adapters, session)); err != nil {
		return fmt.Errorf("printing the inventory: %w", err)
	}
	return nil
}

// cleanUp removes from the Node object what a removed plugin has left.
func cleanUp(ctx context.Context, out io.Writer, o options) error {
	config, err := program.APIConfig(o.kubeconfig, component)
	if err != nil {
		return err
	}
	client, _, err := deviceplugin.NewClient(config)
	if err != nil {
		return err
	}
	if err := deviceplugin.Cleanup(ctx, client, o.plugin.NodeName); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "node %s: %s, %s and %s removed\n", o.plugin.NodeName, protocol.ResourceCount, protocol.ResourceCores, protocol.AnnotationInventory)
	return err
}

// latest returns a function that returns the monitor's part of the settings in force, and nil as long as there are none.
func latest(plugin *deviceplugin.Plugin) func() *inventory.Settings {
	return func() *inventory.Settings {
		if settings := plugin.Settings(); settings != nil {
			return &settings.Settings
		}
		return nil
	}
}

// serve creates the components and runs them until ctx ends.
func serve(ctx context.Context, o options) error {
	logger := klog.FromContext(ctx).WithName(component).WithValues("node", o.plugin.NodeName)
	ctx = klog.NewContext(ctx, logger)
	logger.Info("Starting", "version", version.Get().String())
	if o.plugin.Simulated {
		logger.Info("Warning: the cards of this node are simulated (--simulated-cards). Pods get memory of cards that don't exist, and no container can compute on them")
	}

	config, err := program.APIConfig(o.kubeconfig, component)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 50, 100 // The default of five requests per second would delay the annotations of a burst of pods.
	client, sink, err := deviceplugin.NewClient(config)
	if err != nil {
		return err
	}
	if o.authorizeMetrics {
		reviewer, err := tokenauth.New(config)
		if err != nil {
			return err
		}
		o.plugin.AuthorizeMetrics = reviewer.Handler
	}
	// The kubelet's last calls, after ctx has ended, can still record Events.
	broadcaster := record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx)))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(program.ShortEvents(sink))

	o.plugin.Client, o.plugin.BootID = client, inventory.BootID()
	o.plugin.Events = broadcaster.NewRecorder(runtime.NewScheme(), corev1.EventSource{Component: component, Host: o.plugin.NodeName})
	plugin, err := deviceplugin.New(o.plugin)
	if err != nil {
		return err
	}
	o.monitor.Known, o.monitor.BootID, o.monitor.Latest = plugin.KnownCards, o.plugin.BootID, latest(plugin)
	o.monitor.VisitInterval = o.plugin.UsageInterval
	o.monitor.Visit = func(session *inventory.Session) { plugin.Measure(session) }
	monitor := inventory.New(o.monitor)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return plugin.Run(ctx) })
	group.Go(func() error {
		return monitor.Run(ctx, func(s inventory.State) {
			plugin.SetCards(s.Unit, s.Cards, s.Adapters, s.Moved, s.Problem)
		})
	})
	err = group.Wait()
	logger.Info("Stopped")
	return err
}
