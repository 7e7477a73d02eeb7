package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/deviceplugin"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/tokenauth"
	"github.com/gpushare/gpushare/pkg/version"
)

const component = "gpushare-device-plugin"

// printInventory prints the cards in the format of the inventory annotation.
func printInventory(ctx context.Context, out io.Writer, o options, unit gpu.Unit) error {
	state, err := inventory.List(ctx, inventory.Options{Library: o.nvmlLibrary, Unit: unit, CardMemory: o.cards})
	if err != nil {
		return fmt.Errorf("listing the cards: %w", err)
	}
	if len(state.Cards) == 0 && state.Problem != "" {
		return fmt.Errorf("listing the cards: %s", state.Problem)
	}
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(protocol.Inventory{Unit: unit, Cards: state.Cards}); err != nil {
		return fmt.Errorf("printing the inventory: %w", err)
	}
	return nil
}

// cleanUp removes from the Node object what a removed plugin has left.
func cleanUp(ctx context.Context, out io.Writer, o options) error {
	config, err := apiConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	client, _, err := deviceplugin.NewClient(config)
	if err != nil {
		return err
	}
	if err := deviceplugin.Cleanup(ctx, client, o.nodeName); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "node %s: %s and %s removed\n", o.nodeName, protocol.ResourceCount, protocol.AnnotationInventory)
	return err
}

// serve creates the components and runs them until ctx ends.
func serve(ctx context.Context, o options, unit gpu.Unit) error {
	logger := klog.FromContext(ctx).WithName(component).WithValues("node", o.nodeName)
	ctx = klog.NewContext(ctx, logger)
	logger.Info("Starting", "version", version.Get().String(), "unit", unit.String())

	config, err := apiConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	client, sink, err := deviceplugin.NewClient(config)
	if err != nil {
		return err
	}
	var authorizeMetrics func(http.Handler) http.Handler
	if o.authorizeMetrics {
		reviewer, err := tokenauth.New(config)
		if err != nil {
			return err
		}
		authorizeMetrics = reviewer.Handler
	}
	// The kubelet's last calls, after ctx has ended, can still record Events.
	broadcaster := record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx)))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(sink)

	xids, malformed := inventory.ParseXidChecks(o.disableHealthChecks, o.enableHealthChecks)
	if len(malformed) > 0 {
		logger.Error(nil, "Ignoring invalid Xids in --dp-disable-healthchecks and --dp-enable-healthchecks", "xids", malformed)
	}
	bootID := inventory.BootID()
	plugin, err := deviceplugin.New(deviceplugin.Options{
		Client:             client,
		Events:             broadcaster.NewRecorder(runtime.NewScheme(), corev1.EventSource{Component: component, Host: o.nodeName}),
		NodeName:           o.nodeName,
		Unit:               unit,
		BootID:             bootID,
		VisibleDevices:     deviceplugin.VisibleDevices(o.visibleDevices),
		DeviceList:         deviceplugin.DeviceListStrategy(o.deviceListStrategy),
		ErrorEnv:           o.compatErrorEnv,
		Directory:          o.devicePluginDir,
		PodResourcesSocket: o.podResourcesSocket,
		ListenAddress:      o.listenAddress,
		AuthorizeMetrics:   authorizeMetrics,
	})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return plugin.Run(ctx) })
	group.Go(func() error {
		monitor := inventory.New(inventory.Options{
			Library: o.nvmlLibrary, Unit: unit, CardMemory: o.cards, Xids: xids,
			Known: plugin.KnownCards, BootID: bootID, QuietPeriod: o.healthQuietPeriod,
		})
		return monitor.Run(ctx, func(s inventory.State) { plugin.SetCards(s.Cards, s.Moved, s.Problem) })
	})
	err = group.Wait()
	logger.Info("Stopped")
	return err
}

// apiConfig returns the configuration of clients of the API server. The default of five requests per second would delay the
// annotations of a burst of pods.
func apiConfig(kubeconfig string) (config *rest.Config, err error) {
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.UserAgent = component + "/" + version.Get().Version
	config.QPS, config.Burst = 50, 100
	return config, nil
}
